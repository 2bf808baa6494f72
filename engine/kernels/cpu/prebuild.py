"""`python -m engine.kernels.cpu.prebuild`: compiles the native kernels before anybody waits for them.

For images, which are built on one machine and run on others: every variant that the machine's kind of CPU may need goes
into the cache where `build.py` looks first. A CPU that wants yet another one compiles it at first use.
"""

import sys

from engine.kernels.cpu.build import KernelsUnavailable, build_library, variants


def main() -> int:
    """Compile all variants and return the exit code: 1, with the reason on standard error, if one cannot be had."""
    try:
        for isa in variants():
            build_library(isa)
    except KernelsUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
