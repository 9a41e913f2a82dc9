"""``python -m autopar.mcp_server``."""

from autopar.mcp_server.serving import main

if __name__ == "__main__":
    main()
