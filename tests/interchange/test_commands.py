"""The command blocks of the documentation that need the extra `interchange` run unchanged in a copy of the tree."""

import pytest

from tests.docs.test_commands import blocks, run_block, tree  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.interchange]

for library in 'ctranslate2', 'safetensors':
    pytest.importorskip(library, reason="it is in the extra 'interchange', and is not installed here")


@pytest.mark.parametrize('page, language, code', blocks(interchange=True))
def test_a_block_of_the_documentation_runs(tree, page, language, code):  # noqa: F811
    run_block(tree, page, language, code)
