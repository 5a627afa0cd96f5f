"""Print an installed package's requirements, one per line, without extras and torch packages."""

import re
import sys
from importlib.metadata import requires

for line in requires(sys.argv[1]):
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?(?![-.\w])", line):
        print(line)
