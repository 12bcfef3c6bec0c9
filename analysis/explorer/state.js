'use strict';
// Texts of the data are inserted only as text nodes, never as markup.
const MEAN = -1;       // the value of state.head for the mean over all heads
const FAINT = 0.08;    // while no token is chosen, smaller weights have no line
const MOST_LINES = 500;
const MOST_LISTED = 64;  // maximum number of tokens in a column; longer texts are shown as paragraphs without lines
const BLANK = '␣';

const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const state = {item: 0, kind: null, layer: null, head: MEAN, merged: false, pinned: null, pointed: null};
let wanted = 0;        // the index of the item that is shown or being loaded
let view = null;       // what is on the screen, or null: {attention, queries, keys, weights, columns, lined}; see draw()

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const percent = share => share > 0 && share < .0005 ? '< 0.1 %' : `${(100 * share).toFixed(1)} %`;
const isolated = text => element('bdi', {}, text);
const spelled = piece => piece.replaceAll('▁', ' ').trim() || BLANK;

/* ---- numbers ---- */

// Unpacks weights when they are needed. They are multiples of 1 / data.steps, stored as all low bytes and then all high
// bytes, deflated and in base 64.
async function unpack(attention) {
  if (attention.values) return;
  const bytes = Uint8Array.from(atob(attention.weights), character => character.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  const halves = new Uint8Array(await new Response(inflated).arrayBuffer());
  const count = halves.length / 2;
  attention.values = Uint16Array.from({length: count}, (_, place) => halves[place] | halves[place + count] << 8);
}

// [text, index of the first piece, index after the last piece] of each token or word.
const groups = (row, merged) => merged ? row.words : row.pieces.map((piece, place) => [spelled(piece), place, place + 1]);

// Returns weights [query][key]. The row of a word is the mean over its pieces; the column is the sum over its pieces.
// Hidden patches are not queries, so their weights are 0.
function table({shape, values}, layer, head, queries, keys) {
  const [, heads, rows, columns] = shape;
  const [from, to] = head === MEAN ? [0, heads] : [head, head + 1];
  return queries.map(([, top, bottom]) => {
    const sums = new Float64Array(keys.length);
    if (item().hidden.includes(top)) return sums;
    for (let h = from; h < to; h++) for (let t = top; t < bottom; t++) {
      const begin = ((layer * heads + h) * rows + t) * columns;
      keys.forEach(([, left, right], key) => {
        for (let s = left; s < right; s++) sums[key] += values[begin + s];
      });
    }
    return sums.map(sum => sum / ((to - from) * (bottom - top) * data.steps));
  });
}

// Returns the weights of a query over all keys, or of a key for all queries. Without a token, the mean over the queries.
function weightsOf(token) {
  const count = view.weights.length - item().hidden.length;
  if (!token) return view.keys.map((_, key) => view.weights.reduce((sum, row) => sum + row[key], 0) / count);
  return token.side === 'queries' ? [...view.weights[token.index]] : view.weights.map(row => row[token.index]);
}

const pictured = ({picture}) => `data:image/png;base64,${picture}`;
const item = () => data.items[state.item];
const opposite = side => side === 'queries' ? 'keys' : 'queries';
const clamp = (value, most) => Math.max(0, Math.min(value, most));

/* ---- the list of examples ---- */

function fillList() {
  $('list').append(...data.items.map((each, index) => {
    const lines = each.texts.slice(0, 2).map(([name, text]) =>
      element('span', {dir: 'auto'}, each.picture ? `${name} ${text}` : text || '–'));
    const images = each.picture ? [element('img', {src: pictured(each), alt: '', loading: 'lazy'})] : [];
    const button = element('button', {type: 'button'}, ...images, ...lines);
    button.onclick = () => show(index);
    return element('li', {}, button);
  }));
  filterList();
}

const listed = () => [...$('list').children].flatMap((line, index) => line.hidden ? [] : [index]);

function filterList() {
  const wanted = $('filter').value.toLowerCase();
  [...$('list').children].forEach((line, index) => {
    line.hidden = !data.items[index].texts.some(([, text]) => text.toLowerCase().includes(wanted));
  });
  const [count, all] = [listed().length, data.items.length];
  $('found').textContent = !all ? 'nothing to show' : count === all ? `${count} in all` : `${count} of ${all}`;
}

function step(by) {
  const indices = listed();
  if (indices.length) show(indices[clamp(indices.indexOf(wanted) + by, indices.length - 1)]);
}

/* ---- choosing ---- */

async function show(index) {
  wanted = index;
  await Promise.all(data.items[index].attention.map(unpack));
  if (wanted !== index) return;  // another item was chosen in the meantime
  state.item = index;
  for (const [place, line] of [...$('list').children].entries()) {
    line.firstChild.setAttribute('aria-current', place === index);
  }
  $('list').children[index].scrollIntoView({block: 'nearest'});
  $('texts').replaceChildren(...item().texts.flatMap(([name, text]) =>
    [element('dt', {}, name), element('dd', {dir: 'auto'}, text || '–')]));
  fillAnswers();
  fillKinds();
  choose({kind: item().attention.some(each => each.kind === state.kind) ? state.kind : item().attention[0].kind});
}

// All changes of the item, kind, layer, head and merging go through this function.
function choose(changes) {
  Object.assign(state, {pinned: null, pointed: null}, changes);
  const attention = item().attention.find(each => each.kind === state.kind);
  const [layers, heads] = attention.shape;
  state.layer = state.layer === null ? layers - 1 : clamp(state.layer, layers - 1);
  if (state.head >= heads || heads === 1) state.head = MEAN;
  const [queries, keys] = [groups(attention.queries, state.merged), groups(attention.keys, state.merged)];
  view = {attention, queries, keys, weights: table(attention, state.layer, state.head, queries, keys)};
  draw();
}

function draw() {
  if (!view) return;
  $('main').hidden = false;
  const focused = document.activeElement.classList.contains('token');
  const [layers, heads] = view.attention.shape;
  for (const input of $('kinds').querySelectorAll('input')) input.checked = input.value === state.kind;
  $('merged').checked = state.merged;
  const chosen = heads === 1 ? '' : state.head === MEAN ? ', mean of the heads' : `, head ${state.head + 1}`;
  $('shown').textContent = layers * heads > 1 ? `layer ${state.layer + 1}${chosen}` : '';
  drawTokens();
  drawHeads();
  drawMatrix();
  highlight();
  if (focused && state.pinned) tokens(state.pinned.side)[state.pinned.index]?.focus({preventScroll: true});
}

function fillKinds() {
  $('kinds').replaceChildren(...item().attention.map(({kind}) => {
    const input = element('input', {type: 'radio', name: 'kind', value: kind});
    input.onchange = () => choose({kind});
    return element('label', {}, input, kind);
  }));
  $('kinds').hidden = item().attention.length === 1;
  $('merging').hidden = Boolean(item().picture);
}

function fillAnswers() {
  const [header, ...rows] = item().answers;
  $('answered').hidden = !header;
  if (!header) return;
  $('answers').replaceChildren(
    element('tr', {}, ...header.map(name => element('th', {scope: 'col'}, name))),
    ...rows.map(row => element('tr', {}, ...row.map(cell => element('td', {dir: 'auto'}, cell || '–')))));
}

/* ---- tokens: two rows of text, or the patches of a picture ---- */

const prediction = place => view.attention.written ? item().predictions[place] : null;
const doubt = ([, begin, end]) => 1 - pieceNumbers(begin, end).reduce((all, place) => all * (prediction(place)?.[1] ?? 1), 1);
const pieceNumbers = (begin, end) => Array.from({length: end - begin}, (_, offset) => begin + offset);

function tokenElement(side, group, index) {
  const made = element('span', {class: 'token', role: 'option', tabindex: index || side === 'keys' ? -1 : 0});
  made.onclick = () => { pin({side, index}); made.focus(); };
  made.onpointerenter = event => { if (event.pointerType === 'mouse') point({side, index}); };
  made.onpointerleave = () => point(null);
  const name = group[0] || BLANK;
  const doubtful = side === 'queries' ? doubt(group) : 0;
  made.style.setProperty('--doubt-share', doubtful.toFixed(3));
  made.setAttribute('aria-label', doubtful ? `${name}, probability ${percent(1 - doubtful)}` : name);
  return made;
}
