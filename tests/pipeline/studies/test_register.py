"""Studies are found by their folders."""

from kvlab_pipeline.studies import register


def test_figures_read_from_the_source_are_those_of_the_chapters():
    drawn = [name for chapter in register.chapters().values() for name in chapter.figures]
    assert drawn and sorted(register.figure_names()) == sorted(drawn)
    assert len(set(drawn)) == len(drawn)
