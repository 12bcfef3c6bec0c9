"""decode.py beside a model that takes as long as it is told."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ANSWERING = '''
import logging, time
import jax
from absl import flags
import decode
from inference.text import Hypothesis, Output, SearchOptions

class Slow:
    """Compiles for 0.6 s, then answers ten lines in 0.4 s."""
    def respond_all(self, lines, options):
        jax.jit(lambda x: time.sleep(0.6) or x + 1)(0.0)
        time.sleep(0.4)
        yield [Output(line, [4], [Hypothesis(line.upper(), [4], 0.0, 0.0)]) for line in lines]

flags.FLAGS(['decode.py'])
decode.log.setLevel(logging.INFO)
decode.log.addHandler(logging.StreamHandler())
decode.answer_file(Slow(), '-', SearchOptions(), None)
'''


def test_what_is_told_of_the_time_is_compiling_apart_from_answering():
    done = subprocess.run([sys.executable, '-c', ANSWERING], cwd=ROOT, input='one\n' * 10, capture_output=True,
                          text=True,
                          timeout=120)
    assert done.stdout == 'ONE\n' * 10, done.stderr
    said = re.search(r'^10 lines in (.*) s, of which (.*) s compiling: (.*) a second otherwise$', done.stderr,
                     re.MULTILINE)
    seconds, compiling, rate = map(float, said.groups())
    assert 0.6 <= compiling < seconds - 0.3 and 10 < rate <= 25  # 0.4 s, and more on a busy machine
