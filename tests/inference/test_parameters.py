"""The table of parameters."""

import numpy as np

from inference.parameters import parameter_table


def test_every_array_has_its_line_and_every_part_its_sum():
    table = parameter_table({'encoder': {'layers_0': {'kernel': np.zeros((3, 4, 100)), 'bias': np.zeros(7)}},
                             'embedding': {'table': np.zeros((5, 3))}})
    assert [line.split() for line in table.splitlines()] == [
        ['encoder/layers_0/bias', '7', '7'],
        ['encoder/layers_0/kernel', '3', 'x', '4', 'x', '100', '1,200'],
        ['=', 'encoder', '1,207'], [],
        ['embedding/table', '5', 'x', '3', '15'],
        ['=', 'embedding', '15'], [],
        ['=', 'all', '1,222']]
    assert len({len(line) for line in table.splitlines() if line}) == 1  # aligned
