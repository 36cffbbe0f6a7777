"""The fault cases that people met in public, each as a test that is named by its id, and what must always hold."""
