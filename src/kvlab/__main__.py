"""``python -m kvlab``."""

from kvlab.cli.main import main

if __name__ == "__main__":
    main()
