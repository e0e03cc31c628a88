"""`python -m drumline.launcher.tethered PID COMMAND …`: a command that ends with its parent.

It becomes the command; what it asks of the kernel before outlasts that. Programs of others
do not watch whoever started them, and must not outlive a launcher that is killed.
"""

import os
import sys

from drumline.core.lifeline import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
