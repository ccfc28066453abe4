"""`python -m kvd` is the daemon."""

from kvd.cli.daemon import main

if __name__ == "__main__":
    main()
