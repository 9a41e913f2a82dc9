"""Sphinx makes the reference of the public names from their docstrings: ``make docs``, into ``build/docs``."""

import autopar

project = "autopar"
author = "autopar authors"
release = autopar.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True  # attributes stand in the docstring of a class, not beside each field
templates_path: list[str] = []
html_theme = "alabaster"
html_theme_options = {"description": "Automatic parallelization for PyTorch", "page_width": "1100px"}
