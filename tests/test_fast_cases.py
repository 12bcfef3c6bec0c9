"""The mark fast_cases, whose rule is in tests/conftest.py."""

import pytest


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize('case', range(4))
def test_only_the_cases_after_the_first_are_slow(case, request):
    assert bool(request.node.get_closest_marker('slow')) == (case >= 2)
