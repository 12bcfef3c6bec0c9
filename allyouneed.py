"""The public names for notebooks: `import allyouneed; run = allyouneed.load('runs/demo')`.

Each name is imported at its first use. The packages of the project (`model`, `inference`, ...) are in the folder of
this file. During the imports, this folder is the first folder on sys.path. So a notebook may be in a folder that has
another `model.py`.

Import this module before you use JAX, because it sets an XLA flag that one version of jaxlib needs (kernels/xla.py).
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
    """Imports the module of a public name, and returns the object with this name.

    Raises:
      ImportError: if another imported module has the name of a package of this project.
    """
    if name not in MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}. It has {", ".join(__all__)}')
    return getattr(_imported(*PACKAGES, MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _imported(*names: str) -> Any:
    """Imports modules of this checkout, and returns the last module.

    Pass the packages that a module uses before the module itself. Python then imports the packages from this checkout
    first, so that the module does not import other packages with the same names.
    """
    if not (HOME / 'inference').is_dir():
        raise ImportError(f'{HOME} has allyouneed.py but not the packages of the project. Clone the repository and '
                          'run `pip install -e .` in the clone')
    for package in PACKAGES:
        file = getattr(sys.modules.get(package), '__file__', None)
        if package in sys.modules and (file is None or HOME not in Path(file).resolve().parents):
            file = file or 'a folder without __init__.py'
            raise ImportError(f'{file} was imported as `{package}`, but allyouneed has a package of this name '
                              f'({HOME / package}). Rename {file}, or use allyouneed in another process')
    sys.path.insert(0, str(HOME))
    try:
        return [importlib.import_module(name) for name in names][-1]
    finally:
        sys.path.remove(str(HOME))


# This must run before JAX is used, because XLA reads its flags only once.
if too_late := _imported('kernels.xla').avoid_wrong_sums():
    warnings.warn(too_late, RuntimeWarning, stacklevel=2)
