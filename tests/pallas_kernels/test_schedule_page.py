"""Pages of counted schedules: rows replaced where a kernel was counted again, and the summary's ranges."""

from pallas_kernels import schedule_page


def row(kernel, model, rows, issue, memory, matrix="0.0", ratio="1.000"):
    return (kernel, model, rows, "1", "1", "1", "0%", "0%", "0%", "0%", "0", ratio, issue, memory, matrix)


OLD = [row("scan decode", "A", "1 x 1", "2.0", "4.0"), row("scan decode", "B", "64 x 1", "9.0", "3.0")]
NEW = [row("scan decode", "B", "64 x 1", "1,500.0", "1,000.0", ratio="1.250")]


def test_a_page_is_read_back():
    page = f"# Title\n\nSome words.\n\n{schedule_page.table(OLD)}"
    assert schedule_page.rows_of(page) == OLD
    assert len(schedule_page.HEADER) == len(OLD[0])


def test_counted_rows_replace_those_before_and_lost_cases_go():
    order = [("scan decode", "B", "64 x 1"), ("scan decode", "C", "1 x 1"), ("scan decode", "A", "1 x 1")]
    assert schedule_page.merged(OLD, NEW, order) == [NEW[0], OLD[0]]
    assert schedule_page.merged(OLD, NEW, order[:1]) == NEW


def test_the_summary_spans_models_and_rows():
    prefill = row("scan prefill", "A", "1 x 2048", "30.0", "45.0", "15.0")
    made = schedule_page.summary({"one": [OLD[0], NEW[0], prefill], "two": [OLD[0]]})
    by_memory, by_matrix = made.split("\n\n")
    assert by_memory.splitlines()[0] == "| issue / memory | bytes / fewest | one | two |"
    assert by_memory.splitlines()[2:] == [
        "| scan decode | 1.00 to 1.25 | 0.50 to 1.50 | 0.50 |",
        "| scan prefill | 1.00 | 0.67 | - |",
    ]
    assert by_matrix.splitlines()[2:] == ["| scan prefill | 3.00 | - |"]
