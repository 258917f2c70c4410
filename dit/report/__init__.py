"""One page about one run or several: `python -m dit.report RUN_DIR [RUN_DIR ...]`.

The page is a single file: curves and pictures are inlined and nothing is fetched. It reads well on
a phone, by day and by night. Nothing here imports torch.

    reading   a run folder -> `RunRecord`
    series    its metrics -> what is drawn together
    charts    lines -> inline SVG
    findings  what deserves a look: fill, skipped steps, refused samples, spikes
    figures   tables: summary, settings that differ, data, environment
    pictures  grids of samples over the steps, with a slider; pictures beside their prompts; what is
              no picture is left out and named
    page      all of it -> HTML
"""

from dit.report.page import write_page
from dit.report.reading import ReportError, RunRecord, read_runs

__all__ = ["ReportError", "RunRecord", "read_runs", "write_page"]
