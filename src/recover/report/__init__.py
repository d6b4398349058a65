"""One HTML file that shows what happened in any number of runs. Layer: files, above the records.

The file stands alone: no script, style or font of others, and a policy in its head that forbids the
browser to load anything. Whoever has it can read it, in a mail, years later, without a network.

``data`` computes what is shown, ``curves`` and ``boxes`` draw it over one ``axis``, ``sections``
and ``page`` lay it out; ``template.html`` has the style sheet and the script.
"""

from recover.report.page import write_report

__all__ = ["write_report"]
