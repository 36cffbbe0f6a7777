"""The store on S3, on a real server, with and without trouble on the way to it."""
