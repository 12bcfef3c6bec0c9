function drawTokens() {
  const picture = item().picture;
  $('picture').hidden = !picture;
  $('sentences').hidden = Boolean(picture);
  if (picture) return drawPicture();
  for (const side of ['queries', 'keys']) {
    const row = view.attention[side];
    $(side).replaceChildren(...view[side].flatMap((group, index) => {
      const made = tokenElement(side, group, index);
      const special = row.special.slice(group[1], group[2]).includes(true);
      made.classList.toggle('quiet', special || (group[0] || BLANK) === BLANK);
      made.append(special ? isolated(group[0]) : group[0] || BLANK);  // isolated, because <s> must not determine the writing direction of the row
      const apart = row.apart[group[1]];
      made.classList.toggle('apart', apart);
      return apart ? [' ', made] : [made];
    }));
  }
  [$('query-title').textContent, $('key-title').textContent] = view.attention.titles;
  arrange();
}

// Draws queries and keys as two rows if each of them fits into one line, otherwise as two columns. So no line between
// tokens runs behind another token.
function arrange() {
  const place = $('sentences').classList;
  place.remove('columns', 'unlined');
  const wraps = row => row.clientHeight > 1.5 * parseFloat(getComputedStyle(row).lineHeight);
  const wrapped = [$('queries'), $('keys')].some(wraps);
  view.columns = wrapped && Math.max(view.queries.length, view.keys.length) <= MOST_LISTED;
  view.lined = view.columns || !wrapped;
  place.toggle('columns', view.columns);
  place.toggle('unlined', !view.lined);
  for (const row of [$('queries'), $('keys')]) row.setAttribute('aria-orientation', view.columns ? 'vertical' : 'horizontal');
}

function drawPicture() {
  const {grid} = item();
  $('figure').querySelector('img').src = pictured(item());
  $('figure').classList.toggle('series', view.attention.titles[0] === 'windows');
  const made = view.queries.map((group, index) => {
    const token = tokenElement('queries', group, index);
    token.title = group[0];
    return token;
  });
  const others = made.slice(0, made.length - grid[0] * grid[1]);
  others.forEach((token, index) => token.append(view.queries[index][0]));
  $('others').replaceChildren(...others);
  $('patches').style.gridTemplateColumns = `repeat(${grid[1]}, 1fr)`;
  $('patches').replaceChildren(...made.slice(others.length));
}

const tokens = side => [...(item().picture ? $('picture') : $(side)).querySelectorAll('.token')];

function pin(token) { state.pinned = token; state.pointed = null; highlight(); }
function point(token) { state.pointed = token; highlight(); }

// Updates only the parts of the page that depend on the chosen token.
function highlight() {
  const active = state.pointed ?? state.pinned;
  const picture = Boolean(item().picture);
  const weights = weightsOf(active);
  const seen = opposite(active?.side ?? 'queries');
  // The scale excludes the class token, because its weight may be much larger than the weights of the patches.
  const peak = Math.max(...(picture ? weights.slice(-item().grid[0] * item().grid[1]) : weights), 1e-9);
  for (const side of picture ? ['queries'] : ['queries', 'keys']) {
    tokens(side).forEach((token, index) => {
      const shaded = picture || (active && side === seen);
      token.style.setProperty('--weight', shaded ? Math.min(weights[index] / peak, 1).toFixed(3) : 0);
      const on = active?.side === side && active.index === index;
      token.classList.toggle('active', on);
      token.setAttribute('aria-selected', on);
    });
  }
  drawLines(active, picture);
  fillDetail(active, weights, seen);
  moveCursor(active);
}

/* ---- lines between the two rows, or columns ---- */

function drawLines(active, picture) {
  if (picture || !view.lined) return $('lines').replaceChildren();
  const origin = $('map').getBoundingClientRect();
  const places = Object.fromEntries(['queries', 'keys'].map(side => [side, tokens(side).map(token => {
    const box = token.getClientRects()[0];
    return view.columns ? [(side === 'keys' ? box.right : box.left) - origin.left, box.top + box.height / 2 - origin.top]
      : [box.left + box.width / 2 - origin.left, (side === 'keys' ? box.bottom : box.top) - origin.top];
  })]));
  const pairs = view.weights.flatMap((row, query) => [...row].map((weight, key) => ({query, key, weight})))
    .filter(({query, key, weight}) => active
      ? (active.side === 'queries' ? query : key) === active.index && weight >= .005 : weight >= FAINT)
    .sort((one, other) => other.weight - one.weight).slice(0, MOST_LINES);
  $('lines').replaceChildren(...pairs.map(({query, key, weight}) => {
    const [[x, y], [u, v]] = [places.keys[key], places.queries[query]];
    const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    const [across, down] = [(x + u) / 2, (y + v) / 2];
    path.setAttribute('d', `M${x} ${y}C${view.columns ? `${across} ${y} ${across} ${v}` : `${x} ${down} ${u} ${down}`} ${u} ${v}`);
    path.setAttribute('stroke-width', (0.6 + 5.4 * weight).toFixed(2));
    path.setAttribute('opacity', (active ? 0.25 + 0.65 * weight : 0.5 * weight).toFixed(3));
    return path;
  }));
}

/* ---- the panel about a token ---- */

function bars(pairs, className = '') {
  return element('ul', {class: `bars ${className}`}, ...pairs.map(([name, share]) => {
    const line = element('li', {}, isolated(name), element('span', {}, percent(share)));
    line.style.setProperty('--share', share);
    return line;
  }));
}

function fillDetail(active, weights, seen) {
  if (!active) {
    return $('detail').replaceChildren(element('h2', {}, 'Token'), item().picture
      ? 'The mean attention of all queries. Choose a patch to see its attention.'
      : 'Choose a token to see the tokens that it attends to, or the tokens that attend to it.',
      ...(view.attention.written ? [element('h3', {}, 'Underlined: tokens with a low probability.')] : []));
  }
  const group = view[active.side][active.index];
  const most = [...weights.keys()].filter(index => weights[index] > 0).sort((one, other) => weights[other] - weights[one]).slice(0, 5);
  const about = [element('strong', {}, isolated(group[0] || BLANK)),
    element('h3', {}, active.side === 'queries' ? 'attends to' : 'receives attention from'),
    bars(most.map(index => [view[seen][index][0] || BLANK, weights[index]]))];
  if (active.side === 'queries') {
    for (const place of pieceNumbers(group[1], group[2])) {
      const predicted = prediction(place);
      if (!predicted) continue;
      const [piece, probability, alternatives] = predicted;
      about.push(element('h3', {}, isolated(spelled(piece)), ` has probability ${percent(probability)}. Alternatives:`),
        bars(alternatives.slice(0, group[2] - group[1] > 1 ? 2 : 5).map(([other, share]) => [spelled(other), share]), 'doubt'));
    }
  }
  $('detail').replaceChildren(...about);
}

/* ---- all heads, small ---- */

function drawHeads() {
  const [layers, heads, rows, columns] = view.attention.shape;
  $('chooser').hidden = layers * heads === 1;
  const shown = heads === 1 ? [MEAN] : [MEAN, ...Array(heads).keys()];
  $('heads').style.gridTemplateColumns = `1.2rem repeat(${shown.length}, minmax(1.4rem, 3.2rem))`;
  const buttons = Array.from({length: layers}, (_, layer) => [
    element('span', {}, layer + 1),
    ...shown.map(head => {
      const name = `layer ${layer + 1}, ${head === MEAN ? 'mean' : `head ${head + 1}`}`;
      const button = element('button', {type: 'button', title: name, 'aria-label': name,
        'aria-pressed': layer === state.layer && head === state.head}, thumbnail(layer, head));
      button.onclick = () => { choose({layer, head, pinned: state.pinned}); $('heads').querySelector('[aria-pressed=true]').focus(); };
      return button;
    })]);
  const names = heads === 1 ? [''] : ['mean', ...Array.from({length: heads}, (_, head) => head + 1)];
  $('heads').replaceChildren(...['', ...names].map(name => element('span', {}, name)), ...buttons.flat());
  for (const canvas of $('heads').querySelectorAll('canvas')) paint(canvas);
  showChosenHead();

  function thumbnail(layer, head) {
    const canvas = element('canvas', {width: columns, height: rows});
    Object.assign(canvas.dataset, {layer, head});
    return canvas;
  }
}

// Scrolls the panel to the chosen head, but not the page, as Element.scrollIntoView would do. On the left, the numbers of
// the layers cover 22 pixels.
function showChosenHead() {
  const [panel, chosen] = [$('heads'), $('heads').querySelector('[aria-pressed=true]')].map(part => part.getBoundingClientRect());
  $('heads').scrollLeft += Math.max(0, chosen.right + 3 - panel.right) + Math.min(0, chosen.left - 25 - panel.left);
}

// Whether the keys run from right to left. Then key 0 is the last column of the matrix and of the thumbnails.
const isBackwards = () => !item().picture && getComputedStyle($('keys')).direction === 'rtl';

function paint(canvas) {
  const {queries, keys} = view.attention;
  const weights = table(view.attention, Number(canvas.dataset.layer), Number(canvas.dataset.head),
    groups(queries, false), groups(keys, false));
  const peak = weights.reduce((most, row) => Math.max(most, ...row), 1e-9);
  const [red, green, blue] = color(canvas);
  const image = new ImageData(canvas.width, canvas.height);
  const column = isBackwards() ? key => canvas.width - 1 - key : key => key;
  weights.forEach((row, t) => row.forEach((weight, s) =>
    image.data.set([red, green, blue, 255 * weight / peak], 4 * (t * canvas.width + column(s)))));
  canvas.getContext('2d').putImageData(image, 0, 0);
}

const color = of => getComputedStyle(of).color.match(/[\d.]+/g).slice(0, 3).map(Number);

/* ---- the matrix ---- */

const FONT = '12px system-ui, sans-serif';

// Rows are queries and columns are keys. The columns have the writing direction of the text.
function drawMatrix() {
  const {queries, keys, weights} = view;
  const canvas = $('matrix');
  const ink = canvas.getContext('2d');
  ink.font = FONT;
  const widest = names => Math.min(120, Math.max(...names.map(([name]) => ink.measureText(name || BLANK).width)) + 8);
  const width = canvas.closest('section').clientWidth - 32;
  const side = clamp((width - widest(queries)) / keys.length, 26);
  const named = side >= 12;
  const [left, top] = named ? [widest(queries), widest(keys)] : [0, 0];
  const cell = named ? side : clamp(width / keys.length, 12);
  const backwards = isBackwards();
  const column = key => left + cell * (backwards ? keys.length - 1 - key : key);
  view.matrix = {left, top, cell, column};

  const [across, down, ratio] = [left + cell * keys.length, top + cell * queries.length, devicePixelRatio];
  Object.assign(canvas, {width: Math.ceil(across * ratio), height: Math.ceil(down * ratio)});
  Object.assign(canvas.style, {width: `${across}px`, height: `${down}px`});
  ink.scale(ratio, ratio);
  const peak = weights.reduce((most, row) => Math.max(most, ...row), 1e-9);
  ink.fillStyle = getComputedStyle(canvas).color;
  const space = named ? 1 : 0;
  weights.forEach((row, t) => row.forEach((weight, s) => {
    ink.globalAlpha = 0.03 + 0.97 * weight / peak;
    ink.fillRect(column(s), top + cell * t, cell - space, cell - space);
  }));
  ink.globalAlpha = 1;
  if (named) drawNames(ink);
  const {titles} = view.attention;
  $('matrix-title').textContent = `Rows: ${titles[0]} (queries). Columns: ${titles[1]} (keys). Largest weight: ${percent(peak)}`;
}

function drawNames(ink) {
  const {left, top, cell, column} = view.matrix;
  ink.font = FONT;
  ink.fillStyle = getComputedStyle($('matrix-title')).color;
  ink.textBaseline = 'middle';
  ink.textAlign = 'right';
  view.queries.forEach(([name], t) => ink.fillText(name || BLANK, left - 6, top + cell * (t + .5), left - 6));
  ink.textAlign = 'left';
  view.keys.forEach(([name], s) => {
    ink.save();
    ink.translate(column(s) + cell / 2, top - 6);
    ink.rotate(-Math.PI / 2);
    ink.fillText(name || BLANK, 0, 0, top - 6);
    ink.restore();
  });
}

function cellAt(event) {
  const {left, top, cell, column} = view.matrix;
  const box = $('matrix').getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const query = Math.floor((y - top) / cell);
  const key = view.keys.findIndex((_, s) => x >= column(s) && x < column(s) + cell);
  return x >= left && query >= 0 && query < view.queries.length && key >= 0 ? {side: 'queries', index: query, key} : null;
}

// Prints the weight of the cell under the pointer. Without a pointer, frames the row or column of the chosen token.
function moveCursor(active) {
  const {left, top, cell, column} = view.matrix;
  $('cursor').hidden = !active;
  $('cell').textContent = '';
  if (!active) return;
  const edge = Math.min(column(0), column(view.keys.length - 1));
  const whole = [left || edge, top, cell * view.keys.length, cell * view.queries.length];
  let [x, y, width, height] = whole;
  if (active.side === 'queries') [y, height] = [top + cell * active.index, cell];
  if (active.side === 'keys' || active.key !== undefined) [x, width] = [column(active.key ?? active.index), cell];
  Object.assign($('cursor').style, {left: `${x - 1}px`, top: `${y - 1}px`, width: `${width + 1}px`, height: `${height + 1}px`});
  if (active.key === undefined) return;
  const [query, key] = [view.queries[active.index][0] || BLANK, view.keys[active.key][0] || BLANK];
  $('cell').append(isolated(query), ' attends to ', isolated(key), ': ',
    element('span', {class: 'number'}, percent(view.weights[active.index][active.key])));
}

/* ---- keyboard, theme, start ---- */

// Moves to another token with an arrow key. Left and right follow the writing direction of the row, so they may go the
// other way inside words of the other direction. Up chooses the key and down the query with the same index, or, in a
// picture, the patch above or below. In columns, up and down stay in the column, and left and right change it.
function walk(key) {
  const {side, index} = state.pinned ?? {side: 'queries', index: -1};
  const forward = item().picture || getComputedStyle($(side)).direction === 'ltr' ? 'ArrowRight' : 'ArrowLeft';
  const vertical = key === 'ArrowUp' || key === 'ArrowDown';
  let next = {side, index: index + (key === forward ? 1 : -1)};
  if (vertical && item().picture) next.index = patchBeyond(index, key);
  else if (view.columns && vertical) next.index = index + (key === 'ArrowUp' ? -1 : 1);
  else if (view.columns) next = {side: key === 'ArrowLeft' ? 'keys' : 'queries', index};
  else if (vertical) next = {side: key === 'ArrowUp' ? 'keys' : 'queries', index};
  next.index = clamp(next.index, tokens(next.side).length - 1);
  pin(next);
  tokens(next.side)[next.index].focus({preventScroll: true});
}

// Returns the index of the token above or below a token of a picture; at the edges, the index of the token itself. The
// class token, if there is one, is above the first row.
function patchBeyond(index, key) {
  const [rows, columns] = item().grid;
  const first = view.queries.length - rows * columns;  // the index of the first patch
  if (index < first) return key === 'ArrowDown' ? first : Math.max(index, 0);
  const next = index + (key === 'ArrowDown' ? columns : -columns);
  if (next < first) return first > 0 ? first - 1 : index;
  return next < view.queries.length ? next : index;
}

function turnLayer(by) {
  const layers = view.attention.shape[0];
  choose({layer: (state.layer + by + layers) % layers, pinned: state.pinned});
}

function turnHead(by) {
  const heads = view.attention.shape[1];
  const place = state.head + 1 + by;  // MEAN is -1: places 0 to heads
  choose({head: (place + heads + 1) % (heads + 1) - 1, pinned: state.pinned});
}

function turnKind(by) {
  const kinds = item().attention.map(each => each.kind);
  choose({kind: kinds[(kinds.indexOf(state.kind) + by + kinds.length) % kinds.length]});
}

const KEYS = {
  l: turnLayer, h: turnHead, k: turnKind,
  w: () => item().picture || choose({merged: !state.merged}), n: step, p: by => step(-by),
  t: () => turnTheme(), escape: () => pin(null), '/': () => $('filter').focus(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === $('filter')) {
    if (event.key === 'Escape' || event.key === 'Enter') $('filter').blur();
    return;
  }
  if (!view && event.key.toLowerCase() !== 't') return;  // without a view, only the theme can change
  if (event.key.startsWith('Arrow')) {
    if (event.target.type === 'radio') return;  // in radio buttons, arrow keys change the kind
    walk(event.key);
  } else if (KEYS[event.key.toLowerCase()]) {
    KEYS[event.key.toLowerCase()](event.shiftKey ? -1 : 1);
  } else return;
  event.preventDefault();
}

const systemDark = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (document.documentElement.style.colorScheme || (systemDark.matches ? 'dark' : 'light')) === 'dark';

function turnTheme() {
  document.documentElement.style.colorScheme = isDark() ? 'light' : 'dark';
  showTheme();
}

function showTheme() {
  $('theme').textContent = isDark() ? 'Light' : 'Dark';
  draw();
}

async function start() {
  $('about').textContent = data.about;
  document.title = `Attention: ${data.about}`;
  fillList();
  $('filter').oninput = filterList;
  $('merged').onchange = () => choose({merged: $('merged').checked});
  $('theme').onclick = turnTheme;
  $('controls').onsubmit = event => event.preventDefault();
  $('matrix').onpointermove = event => point(cellAt(event));
  $('matrix').onpointerleave = () => point(null);
  $('matrix').onclick = event => point(cellAt(event));  // on a touch screen, a click follows pointerleave, so the cell stays chosen
  document.addEventListener('keydown', onKey);
  if (data.items.length) await show(0);
  $('theme').textContent = isDark() ? 'Light' : 'Dark';
  systemDark.addEventListener('change', showTheme);
  let width = innerWidth;
  addEventListener('resize', () => { if (view && innerWidth !== width) { width = innerWidth; draw(); } });
  document.documentElement.dataset.ready = Math.round(performance.now());  // milliseconds since the page was opened
}

start();
