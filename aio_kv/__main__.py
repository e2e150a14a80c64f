"""`python -m aio_kv`: the command line."""

from aio_kv.cli import main

if __name__ == "__main__":
    main()
