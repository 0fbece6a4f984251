"""`python -m tests.clients.setup`: installs the outside client tools."""

from tests.clients.tools import TOOLS, install

if __name__ == "__main__":
    for tool in TOOLS:
        install(tool)
