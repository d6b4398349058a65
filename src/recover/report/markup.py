"""HTML built out of values: whatever is not markup already is escaped. Layer: report."""

from html import escape

_VOID = frozenset({"br", "line", "path", "rect"})


class Html(str):
    """Text that is markup and goes into a page as it is; any other text is escaped."""

    __slots__ = ()


def tag(name: str, *children: str | int, **attributes: object) -> Html:
    """Return one element.

    An attribute is called as in HTML, with ``_`` for ``-`` and after a Python keyword
    (``class_``); one that is None or False is left out.
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: str | int) -> Html:
    """Return children one after the other."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
    return f' {name}="{"" if value is True else escape(str(value))}"'
