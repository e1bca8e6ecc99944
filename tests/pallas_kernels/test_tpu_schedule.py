import pytest

from pallas_kernels import tpu_schedule


def bundles():
    """A body of 410 bundles that the last step skips; in it 120 for a first step, and 250 of each step's own."""
    lines = [f"  {address:#x}   : > {{ nop }} " for address in range(430)]

    def mark(address, text):
        lines[address] = lines[address].replace("{ nop }", f"{{ {text} }}")

    mark(10, "%1 = sbr.rel (%p1) target = $region7")
    mark(12, "%2 = sbr.rel (%p2) target = $region8 ")
    lines[132] += "/* Start region 8 */"
    mark(140, "%3 = sbr.rel (%p3) target = $region9")
    mark(145, "%4 = sbr.rel (%p3) target = $region10")
    lines[150] += "/* Start/End empty region 10 */"
    lines[390] += "/* Start region 9 */"
    lines[420] += "/* Start region 7 */"
    mark(425, "%5 = sbr.rel (%p5) target = $region3")
    lines[5] = lines[5].replace("   : >", " LB: >") + "/* Start region 3 */"
    return "control words\n" + "\n".join(lines)


def utilization():
    """Two slots of the one unit; the step's own bundles use one of them, and store a spilt register in every fifth."""
    rows = [
        f"{int(141 <= address < 390)} {int(address >= 140 and address < 390 and address % 5 == 0)}"
        for address in range(430)
    ]
    return "== UNITS ==\nMXU, VSTORE:SPILL\n2 1\n== UTILIZATION:\n" + "\n".join(rows) + "\n"


def test_tells_a_step_s_bundles_from_those_of_a_first_step():
    schedule = tpu_schedule.read(bundles(), utilization())
    assert (schedule.step, schedule.edge) == (430 - 120, 120)
    assert schedule.units["MXU"] == pytest.approx(249 / 500)
    assert schedule.spills == 50


def test_all_conditional_work_may_be_rare():
    schedule = tpu_schedule.read(bundles(), utilization(), rare=True)
    assert (schedule.step, schedule.edge) == (430 - 120 - 250, 120 + 250)
    assert schedule.units["MXU"] == 0


def looped():
    """As above, and within the step's own 250 bundles a loop of 220, with two bodies to choose from, 101 and 103."""
    text = bundles().splitlines()

    def mark(address, text_before, region=""):
        text[address + 1] = text[address + 1].replace("{ nop }", f"{{ {text_before} }}") + region

    mark(151, "nop", "/* Start region 20 */")
    mark(155, "%7 = sbr.rel (%p7) target = $region21")
    mark(256, "nop", "/* Start region 21 */")
    mark(257, "%8 = sbr.rel (%p8) target = $region22")
    mark(360, "nop", "/* Start region 22 */")
    mark(370, "%9 = sbr.rel (%p9) target = $region20")
    return "\n".join(text)


def test_finds_a_loop_and_the_bodies_it_chooses_from():
    schedule = tpu_schedule.read(looped(), utilization())
    assert (schedule.step, schedule.edge) == (430 - 120, 120)
    assert schedule.loop == tpu_schedule.Loop(220, (101, 103))
    assert schedule.units["MXU"] == pytest.approx(1 / 2)
    assert schedule.spills == 44
    # Each trip issues the loop's own 16 bundles, and one body.
    assert schedule.loop.issued((5, 1)) == 6 * 16 + 5 * 101 + 103
    assert tpu_schedule.Loop(220, ()).issued((3,)) == 3 * 220


def test_counts_each_loop_by_itself():
    schedule = tpu_schedule.read(looped(), utilization())
    # That over grid steps, from 5 to 425, has within it the loop of 220.
    assert (schedule.outside, schedule.loops) == (430 - 421, (421 - 220, 220))
    assert schedule.issued((3,)) == 430 - 220 + 3 * 220
    with pytest.raises(ValueError, match=r"loops of a step: expected 3, got 2: \(201, 220\)"):
        schedule.issued((1, 2, 3))


def test_takes_the_one_kernel_of_a_name_and_empties_the_folder(tmp_path):
    (tmp_path / "1-other-72-final_bundles.txt").write_text("")
    with pytest.raises(ValueError, match=r"schedules of 'delta' in .*: expected one, got \[\]"):
        tpu_schedule.take(tmp_path, "delta")
    (tmp_path / "1-delta-72-final_bundles.txt").write_text(bundles())
    (tmp_path / "1-delta-71-schedule-analysis_final_bundles.txt").write_text("")
    (tmp_path / "1-delta-80-final_hlo-static-per-bundle-utilization.txt").write_text(utilization())
    assert tpu_schedule.take(tmp_path, "delta").edge == 120
    assert list(tmp_path.iterdir()) == []
