"""The public names for notebooks: `import allyouneed; run = allyouneed.load('runs/demo')`.

Each name is loaded when it is first used. The packages behind it (`model`, `inference`, ...) are in the folder of this
file, which comes first on the path while they are imported, so a notebook may lie beside a `model.py` of its own.
Import this module before you use JAX: it sets an XLA flag that one version of jaxlib needs (kernels/xla.py).
"""

import importlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.compare import load_runs, results_table
    from analysis.pictures import answer_figure, attention_figure, heads_figure, save_figure
    from configs import recipe
    from inference.options import search_options
    from inference.run import load
    from inference.tables import to_pandas
    from interchange.export import export
    from runtime.errors import UserError
    from training.imported import import_weights
    from training.loop import train

__all__ = ['UserError', 'answer_figure', 'attention_figure', 'export', 'heads_figure', 'import_weights', 'load',
           'load_runs', 'recipe', 'results_table', 'save_figure', 'search_options', 'to_pandas', 'train']

HOME = Path(__file__).resolve().parent
PACKAGES = ('runtime', 'configs', 'kernels', 'model', 'input_pipeline', 'run_directory', 'interchange', 'inference',
            'training', 'analysis')
MODULES = {
    'load': 'inference.run', 'search_options': 'inference.options', 'to_pandas': 'inference.tables',
    'train': 'training.loop', 'recipe': 'configs', 'import_weights': 'training.imported',
    'export': 'interchange.export', 'load_runs': 'analysis.compare', 'results_table': 'analysis.compare',
    'answer_figure': 'analysis.pictures', 'attention_figure': 'analysis.pictures',
    'heads_figure': 'analysis.pictures', 'save_figure': 'analysis.pictures', 'UserError': 'runtime.errors'}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name.

    Raises:
      ImportError: if another module has the name of a package.
    """
    if name not in MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}. It has {", ".join(__all__)}')
    return getattr(_imported(*PACKAGES, MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _imported(*names: str) -> Any:
    """Imports modules of this checkout, and returns the last one.

    The packages are imported before the module, so that its own later imports find them and no others of their names.
    """
    if not (HOME / 'inference').is_dir():
        raise ImportError(f'{HOME} has allyouneed.py but not its packages. allyouneed is a codebase to clone: run '
                          '`pip install -e .` in the clone')
    for package in PACKAGES:
        file = getattr(sys.modules.get(package), '__file__', None)
        if package in sys.modules and (file is None or HOME not in Path(file).resolve().parents):
            raise ImportError(f'{file or "a folder without __init__.py"} was imported as `{package}`, the name of a '
                              f'package of allyouneed ({HOME / package}). Rename that module, or use allyouneed in '
                              'another process')
    sys.path.insert(0, str(HOME))
    try:
        return [importlib.import_module(name) for name in names][-1]
    finally:
        sys.path.remove(str(HOME))


# Before JAX is used: XLA reads its flags once.
if too_late := _imported('kernels.xla').avoid_wrong_sums():
    warnings.warn(too_late, RuntimeWarning, stacklevel=2)
