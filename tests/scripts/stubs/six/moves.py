"""What one script imports from here."""

import urllib.request

__all__ = ["urllib"]
