"""Code that all scripts share: it parses flags, prints help, reports errors and sets the exit status.

A script defines its flags after its light imports, calls `read_command_line`, and then imports the slow libraries. So
the answer to --help or to a wrong flag does not wait for JAX. Flags that libraries define are not accepted.

Scripts exit with 0 on success. If the request cannot be fulfilled, they print one message on stderr and exit with 2.
Any other exception is a bug in this code, and its traceback is printed.
"""

import contextlib
import inspect
import logging
import os
import re
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator

from absl import app, flags
from absl import logging as absl_logging

from configs.allowed import OneOf
from configs.checks import NO_CONFIG, no_recipe
from configs.options import DEFAULTS, OPTIONS, SECTIONS
from kernels.xla import avoid_wrong_sums
from runtime.errors import UserError, faults_in, full_disk_explained, little_memory_explained, option_like
from runtime.process_setup import replace_stderr, replace_stdout, unless_left_behind, use_huge_pages, use_utf8

# matplotlib reads MPLBACKEND at import and raises an error for an unknown backend. Scripts draw only into files, which
# needs no backend. Every script imports this file before matplotlib, so the variable is removed here.
os.environ.pop('MPLBACKEND', None)

if sys.stderr is None:  # stderr is closed. Otherwise print(..., file=sys.stderr) would print on stdout.
    sys.stderr = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115 (it stays open until the process ends)

TOO_LATE = avoid_wrong_sums()  # scripts import this file before they use JAX

_arguments: list[str] | None = None  # the script's name and the arguments that are not flags; None before parsing


def read_command_line(*, takes: str | None = None, module: str = '__main__') -> None:
    """Parses the flags of a script. Exits if --help is given or the command line is wrong.

    A script calls this after it defines its flags and before it imports slow libraries. After this call, the project's
    log (the logger 'allyouneed') goes to stderr, and only results go to stdout.

    Args:
      takes: the name of the positional argument (an argument that is not a flag), if the script has one.
      module: the module whose docstring --help prints.
    """
    global _arguments
    use_utf8()
    replace_stderr()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter('%(message)s'))
    log = logging.getLogger('allyouneed')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # otherwise absl's handler would print each line again
    replace_stdout()
    app.define_help_flags()
    with _quietly_ended(), _explained():
        if help_flags := _asked_for_help():
            _help(module, full='--helpfull' in help_flags)
            _flush()
            sys.exit(0)
        arguments = _parse(sys.argv)
        if len(arguments) > (2 if takes else 1):
            quoted = arguments[-1].startswith(("'--", '"--'))
            raise UserError(f'unexpected argument {arguments[-1]!r}. '
                            + ('Remove the quotes: a file of flags is not read by a shell' if quoted else
                               'Write options as flags, --name=value'))
        if takes and len(arguments) < 2:
            raise UserError(f'{takes} is missing. See --help')
        _arguments = arguments
    sys.excepthook = _explain_import


def run_script(main: Callable[..., None], *, takes: str | None = None, computes: bool = False,
               ends_at_once: bool = False) -> None:
    """Calls `main` with the positional arguments. On a UserError, prints the message and exits with status 2.

    If the script has not called `read_command_line`, this function calls it with the same `takes`. If `computes` is
    true and no help is requested, the memory allocator is configured for XLA (`use_huge_pages`). If `ends_at_once` is
    true, the process exits directly after `main`, without freeing all objects. This saves 0.35 s of processor time
    after a translation. In this case, `main` must close its files. After an error or Ctrl-C, the process also exits
    without waiting for threads that still compute.
    """
    if computes and not _asked_for_help():
        use_huge_pages()
    if _arguments is None:
        read_command_line(takes=takes, module=main.__module__)

    def guarded(argv):
        if not flags.FLAGS['verbosity'].present:
            absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax logs a lot
            # A failed task of Orbax is reported once, by this script. Orbax and asyncio would log a traceback per task.
            absl_logging.get_absl_handler().addFilter(
                lambda record: not (record.exc_info and 'orbax' in record.pathname))
            logging.getLogger('asyncio').setLevel(logging.CRITICAL)
            sys.unraisablehook = unless_left_behind(sys.unraisablehook)
            threading.excepthook = unless_left_behind(threading.excepthook)
        with _explained(), full_disk_explained(_no_room), little_memory_explained():
            if TOO_LATE:
                raise UserError(TOO_LATE)
            main(*argv[1:])
            _flush()
        if ends_at_once:
            sys.stderr.flush()
            os._exit(0)

    try:
        with _quietly_ended():
            app.run(guarded, flags_parser=lambda _: _arguments)
    except SystemExit as ended:
        running = {thread for thread in threading.enumerate() if not thread.daemon} - {threading.main_thread()}
        if ends_at_once and running and isinstance(ended.code, int):
            # sys.exit would wait for the threads. A second Ctrl-C during this time would abort the process.
            with contextlib.suppress(UserError, OSError):
                _flush()
            sys.stderr.flush()
            os._exit(ended.code)
        raise


def _explain_import(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Ends the script with a message if JAX rejects the value of an environment variable.

    This function replaces sys.excepthook. For all other errors, it prints the usual traceback.
    """
    if found := re.search(r"for environment '(JAX_\w+)'|for JAX flag (jax_\w+)$", str(error)):
        name = (found[1] or found[2]).upper()
        _fail(f'{name}={os.environ.get(name)}: JAX does not accept this value. Set the environment variable to another '
              'value, or remove it')
    sys.__excepthook__(kind, error, trace)


@contextlib.contextmanager
def _quietly_ended() -> Iterator[None]:
    """Ends the script without a traceback on Ctrl-C, or when the reader of its output has exited."""
    try:
        yield
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


@contextlib.contextmanager
def flag_files_explained() -> Iterator[None]:
    """Ends the script with a message and status 2 if the code in this context cannot read a file of --flagfile.

    ml_collections reads the files of --flagfile as soon as a script defines --config. Each file is read several times,
    so a pipe on the command line is an error. Files that are named in other files of flags are not checked.
    """
    with _explained():
        for path in map(os.path.expanduser, _values(sys.argv, 'flagfile')):
            if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path) or path == os.devnull):
                raise UserError(f'--flagfile={path} is a pipe or a device, which can be read only once. Use a regular '
                                'file')
        try:
            yield
        except (flags.Error, UnicodeDecodeError) as error:
            raise UserError(_no_flag_file(error) or str(error)) from error


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Ends the script with a message and status 2 on a UserError, or on a system error that names a file."""
    try:
        yield
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:  # the error may be a bug in this code
            raise
        _fail(f'{error.filename}: {error.strerror}')


def _in_words(message: str) -> str:
    """Returns the message for a wrong value of a flag, without Python's technical terms."""
    for reason, rule in ((': invalid literal for int()', 'must be a whole number'),
                           (': could not convert string to float', 'must be a number'),
                           (": ('Non-boolean argument", 'must be true or false')):
        flag, separator, _ = message.partition(reason)
        if separator:
            return f'{flag}: {rule}'
    return message


def _asked_for_help() -> set[str]:
    """Returns the names of the help flags that are on the command line, such as --help."""
    return {'-h', '-help', '--help', '--helpshort', '--helpfull'} & set(sys.argv)


def _parse(argv: list[str]) -> list[str]:
    """Sets the flags, and returns the other arguments.

    Raises:
      UserError: if a flag does not exist, or if a value or the recipe of --config is wrong.
    """
    with flag_files_explained():
        argv = [argv[0], *flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)]
    if '\0' in ''.join(argv):  # a command line cannot contain this character
        raise UserError('a file of --flagfile contains the character NUL. Write the file again as UTF-8 text')
    recipe = ['', *_values(argv, 'config')][-1] if 'config' in flags.FLAGS else ''
    if recipe and not os.path.isfile(file := recipe.partition(':')[0]):  # ':' begins the argument of get_config
        raise UserError(no_recipe(file))
    if 'config' in flags.FLAGS and (problem := _section(argv)):
        raise UserError(problem)
    try:
        with faults_in(recipe, only=True):
            return flags.FLAGS(argv)
    except flags.Error as error:  # an unknown flag, or a value of the wrong type
        raise UserError(_without_recipe(recipe, error) or _not_a_switch(error)
                        or _no_config(recipe, error) or _in_words(str(error)).removeprefix('flag ')) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_unknown_option(argv) or _no_config(recipe, error)
                        or f'--config or one of its overrides is wrong: {error.args[0]}') from error
    except BrokenPipeError:
        raise
    except OSError as error:  # ml_collections: 'Failed loading config file ...', with the reason on the last line
        if not recipe and 'empty string' in str(error):
            raise UserError(NO_CONFIG) from error
        raise UserError('--config or another file of flags cannot be read: '
                        f'{str(error).splitlines()[-1].strip()}') from error


def _flush() -> None:
    """Flushes stdout while a failure can still be reported."""
    if sys.stdout is not None:  # stdout may be closed
        sys.stdout.flush()


def _no_room(error: BaseException, reason: str) -> str:
    return (f'{getattr(error, "filename", None) or "a file"} cannot be written: {reason}. Free space on the disks of '
            'the output and of config.cache_dir, then run the same command again')


def _fail(message: str):
    replace_stderr()  # `flag_files_explained` may fail before `read_command_line` replaces stderr
    # No path is longer than 4,096 bytes. A longer word is a mistake, and would fill the screen.
    message = re.sub(r'\S{4097,}', lambda word: f'{word[0][:100]}...', message)
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)


def _values(argv: list[str], flag: str) -> list[str]:
    """Returns the values of a flag, from all arguments --FLAG=VALUE and --FLAG VALUE."""
    return [following if named[1] is None else named[1]
            for argument, following in zip(argv, [*argv[1:], ''], strict=True)
            if (named := re.fullmatch(f'--?{flag}(?:=(.*))?', argument, re.DOTALL))]


def _no_config(recipe: str, error: BaseException) -> str:
    """Returns the message for a recipe if ml_collections could not call its get_config(); '' for other errors."""
    if "no attribute 'get_config'" in str(error):
        return f'{recipe} has no function get_config(). Add this function, which returns the config'
    if 'Error whilst parsing config file' not in str(error):  # the text that ml_collections adds to the exception
        return ''
    while error.__context__ is not None:
        error = error.__context__
    return f'{recipe}: {error}'


def _no_flag_file(error: BaseException) -> str:
    """Returns the message for a file of --flagfile that absl could not read; '' for other errors."""
    if isinstance(error, UnicodeDecodeError):
        return f'a file of --flagfile is not UTF-8 text: {error}'
    reason = error.__context__  # the system's error, without absl's text
    return f'--flagfile={reason.filename}: {reason.strerror}' if isinstance(reason, OSError) else ''


def _without_recipe(recipe: str, error: flags.Error) -> str:
    """Returns the error message if a flag --config.X or --noconfig.X has no recipe, or '' for other errors.

    ml_collections defines the flags --config.X when it reads --config.
    """
    name = _unknown_flag(error).removeprefix('no')
    if recipe or 'config' not in flags.FLAGS or not name.startswith('config.'):
        return ''
    return f'--{name} needs a recipe. Add a recipe, for example --config=configs/demo.py'


def _not_a_switch(error: flags.Error) -> str:
    """Returns the error message if --noconfig.X is not for a True/False option, or '' for other errors."""
    flag = _unknown_flag(error)
    if 'config' not in flags.FLAGS or not flag.startswith('noconfig.'):
        return ''
    return (f'--{flag}: only True/False options have the form --noconfig.OPTION. '
            f'Use --{flag.removeprefix("no")}=VALUE')


def _unknown_flag(error: flags.Error) -> str:
    """Returns the name of the flag that does not exist, or '' for other errors."""
    return error.flagname if isinstance(error, flags.UnrecognizedFlagError) else ''


def _section(argv: list[str]) -> str:
    """Returns the error message for the first flag --config.X whose X is a section of the config, or ''."""
    for argument in argv:
        named = re.match(r'--?(?:no)?config\.([^=]+)(?:=(.*))?$', argument, re.DOTALL)
        if named and named[1] in SECTIONS:
            options = [option for option in OPTIONS if option.name.startswith(f'{named[1]}.')]
            example = next((f'{option.name}={named[2]}' for option in options if isinstance(option.allowed, OneOf)
                            and named[2] in option.allowed.choices), f'{options[0].name}={options[0].default}')
            return (f'{argument}: config.{named[1]} is a section. Set one of its options, such as '
                    f'--config.{example}')
    return ''


def _unknown_option(argv: list[str]) -> str:
    """Returns the error message for the first flag --config.X=... whose option X does not exist.

    Returns '' if the options of all such flags exist.
    """
    for argument in argv:
        named = re.match(r'--?(?:no)?config\.([^=]+)', argument)
        if named and named[1] not in DEFAULTS:
            return (f'--config.{named[1]}: the config has no such option'
                    + (option_like(named[1], DEFAULTS) or '. See configs/options.py'))
    return ''


def _help(module: str, *, full: bool) -> None:
    """Prints the docstring and the flags of the script.

    If `full` is true, also prints the options of the config and the flags of the libraries.
    """
    # absl wraps lines to the width of the terminal, and fails if the terminal is narrower than the indentation.
    os.environ['COLUMNS'] = str(max(40, shutil.get_terminal_size().columns))
    print(inspect.cleandoc(sys.modules[module].__doc__ or ''), flags.FLAGS.main_module_help(), sep='\n\n')
    if 'config' not in flags.FLAGS:
        return
    if not full:
        print('\nOptions of the config are also flags, for example --config.model.num_layers=2. docs/options.md '
              'explains the options,\n--helpfull prints them, and train.py --config=... --print_config prints the '
              'values of a recipe.')
        return
    print('\nOptions of the config, with default, meaning and allowed values:\n')
    for option in OPTIONS:
        allowed = str(option.allowed).replace('`', '')
        print(f'  --config.{option.name}={option.default!r}:  {option.meaning} ({allowed})')
    print('\nFlags of the libraries:\n')
    own = flags.FLAGS.find_module_defining_flag('config')
    print('\n'.join(flags.FLAGS.module_help(module) for module in sorted(flags.FLAGS.flags_by_module_dict())
                    if module != own))
