"""`python -m drumline.device.kernels`: compile what this machine will use, and say what that is."""

import sys

from drumline.device.kernels.native import find_kernels
from drumline.device.kernels.trial import tried


def main() -> int:
    """Compile and try the kernels; their want is no failure, as there is a slower way."""
    found = find_kernels(tried)
    if found.kernels is not None:
        said = f"native kernels for {found.kernels.name}"
    else:
        said = f"no native kernels, PyTorch's are slower: {found.why_none}"
    sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
