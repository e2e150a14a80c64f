"""Other libraries that read files, as contenders of `aio-kv bench disk --against`. One module per library.

Each gets the blocks, the order, the depth and the file that everybody gets. It is set up in several ways, each of which
is tried, and the fastest takes part. Direct I/O is used by all that can do it; for the others the page cache is emptied
of the file before each run, which then goes through the file once at most.
"""
