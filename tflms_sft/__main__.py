"""`python -m tflms_sft`: the command line."""

import sys

from tflms_sft._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
