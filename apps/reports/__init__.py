"""Writes HTML pages about runs: outcome, curves and samples in one file."""

COMMANDS = {
    "Records of runs": {
        "plot": ("paceline.apps.reports.report:plot", "Write the curves of runs as an HTML page."),
        "report": (
            "paceline.apps.reports.report:report",
            "Write one HTML file about a run: outcome, curves, samples, token accounting, spec.",
        ),
    }
}
