"""What an installed package requires, without extras, torch and its companions, line by line."""

import re
import sys
from importlib.metadata import requires

for line in requires(sys.argv[1]):
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?(?![-.\w])", line):
        print(line)
