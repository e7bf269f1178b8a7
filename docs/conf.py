"""Settings of Sphinx: ``sphinx-build -W --keep-going -b html docs docs/_build/html`` makes the pages."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of packages that are imported for the API pages

from sbm_pyg import __version__  # noqa: E402

project, author, copyright = "sbm_pyg", "the sbm_pyg authors", "the sbm_pyg authors, MIT licence"
version = release = __version__

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
default_role = "code"  # docstrings write `code` as Markdown does

myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "forward, message, message_and_aggregate, training, extra_repr"}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = ["Shapes"]
napoleon_use_rtype = False
maximum_signature_line_length = 90

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"sbm_pyg {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = html_show_sourcelink = html_domain_indices = False
pygments_style, pygments_dark_style = "friendly", "native"


def write_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers draw themselves: no script and no network."""
    block = isinstance(node, nodes.math_block)
    latex = re.sub(r"\\[Bb]igg?[lr]?(?![a-z])", "", node.astext())  # brackets grow by themselves
    latex = re.sub(
        r"(\\(?:bar|hat|tilde)) ?(\w|\{\w+\})", r"\1 \2{}", latex
    )  # or an index would stand below the letter
    try:
        tag, kind = ("div", "formula") if block else ("span", "formula" if len(latex) > 40 else "short-formula")
        translator.body.append(f'<{tag} class="{kind}">{tex2mathml(latex, as_block=block)}</{tag}>')
    except MathError as error:
        logging.getLogger(__name__).warning("formula %r: %s", latex, error, location=node)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
