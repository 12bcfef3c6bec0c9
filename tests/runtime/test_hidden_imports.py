"""Large libraries that are installed, but that training does not need."""

import os
import subprocess
import sys

from tests.scripts import ROOT


def test_training_does_not_import_torch(tmp_path):
    """tensorboardX would. The file stands for PyTorch, which not every environment has."""
    (tmp_path / 'torch.py').write_text('class Tensor:\n    pass\n')
    code = "import sys, training.loop; assert 'torch' not in sys.modules; import torch; print(torch.__file__)"
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=os.environ | {'PYTHONPATH': paths},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / 'torch.py')
