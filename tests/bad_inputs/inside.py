"""python -m tools.inside: wrong flags, texts and places, and runs that an analysis does not support."""

from tests.bad_inputs.cases import FOLDER, Case

RUN = '--workdir={run} '
TEXT = RUN + '--text=one '
QUICK = [
    Case('', '--workdir is missing'),
    Case(RUN, '--what is missing. Use --workdir=RUN --what=importance|'),
    Case(RUN + '--what=role', '--what'),
    Case(RUN + '--what=roles --text=one', '--what=roles. It applies only to --what=logit_lens'),
    Case(TEXT + '--what=logit_lens --split=test', '--split does not apply to --what=logit_lens'),
    Case(TEXT + '--what=logit_lens --method=flow', '--what=logit_lens. It applies only to --what=attribution'),
    Case(RUN + '--what=pruning --count=0', '--count=0 must be at least 1'),
    Case(RUN + '--what=pruning --count=99999999999999999999', '--count=99999999999999999999 must be at most'),
    Case(RUN + '--what=pruning --count=few', 'count'),
    Case(RUN + '--what=attribution', '--what=attribution needs --text=TEXT'),
    Case(TEXT + '--what=patching', '--what=patching needs --other=TEXT'),
    Case(RUN + "--what=logit_lens --text='a\tb\tc'", '--text has more than one tab'),
    Case('--workdir={here}/none --what=roles', '{here}/none'),
    Case(TEXT + '--what=logit_lens --output={here}/file', '{here}/file', {'file': 'text'}),
]
SLOW = [
    Case(RUN + '--what=roles --checkpoint=bset', "checkpoint='bset' does not exist"),
    Case(RUN + '--what=roles --place=*/weight', "place '*/weight': the model has no such place. Use one of"),
    Case(RUN + '--what=roles --place=encoder', 'roles are computed from attention weights'),
    Case(RUN + '--what=roles --split=tset', '--split=tset must be one of'),
    Case(RUN + '--what=pruning --count=1', '--count=1: pruning needs at least 2 pairs'),
    Case(TEXT + '--what=attribution --method=integrate', "there is no method 'integrate'. Did you mean integrated"),
    Case(TEXT + '--what=attribution --method=flow --instead=two', "instead='two': method='flow' uses only attention"),
    Case(RUN + "--what=patching --text='one\tun' --other='one two three four'", 'the same number of tokens'),
    Case(RUN + "--what=patching --text='one\tun' --other=two --place=layers_0", "place 'layers_0': the model has no"),
    Case(RUN + "--what=patching --text='one\tun' --other=two --place=*/weights", 'places with the axis "position"'),
    Case(RUN + '--what=patching --text=one --other=one', 'the target has the same log-probability for both sentences'),
    Case(TEXT + '--what=logit_lens --output={here}', '{here}/logit_lens.json', {'logit_lens.json': FOLDER}),
    Case('--workdir={digits} --what=roles', 'task=classification has no texts'),
    Case('--workdir={digits} --what=logit_lens --text=one', 'task=classification has no texts'),
    Case('--workdir={digits} --what=importance', 'task=classification'),
    Case('--workdir={letters} --what=importance', 'the importance of heads needs translations'),
    Case('--workdir={letters} --what=pruning', 'needs translations'),
    Case('--workdir={letters} --what=attribution --text=', '--what=attribution needs --text=TEXT'),
    Case('--workdir={letters} --what=patching --text=one --other=two',
         '--text: patching a language model needs PROMPT<tab>CONTINUATION'),
]
