"""Measures shardstore beside its peers and beside the bare system calls: `python -m benchmarks --help`.

What is saved stands in `states`, what is done with it in `tasks`, who does it in `systems`, what a plain run leaves out
in `choice`; `runner` and `peak` measure, `goals` judges, `notes` explains, `report` writes the page. A peer is used at
the best settings that its documents name.
"""
