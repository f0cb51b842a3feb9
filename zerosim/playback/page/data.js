// The page's data, and small helpers: elements, numbers in words, colours.

const DATA = JSON.parse(document.getElementById('data').textContent);
const SCHEMA = 'zerosim-player', VERSION = 3;
const DEVICE = 'device';
const MEMORIES = { device: 'on the device', host: 'in host memory', nvme: 'on NVMe' };
const [ALLOC, FREE, RETAG, KERNEL, LAUNCH, WAIT, MESSAGE, MARK, COPY, HOST_ALLOC, HOST_FREE] = Array(11).keys(); // kinds of events
const STATES = ['param', 'grad', 'optim'];
const GATHERED = { param: ['unsharded_param', 'prefetched_param'], grad: ['unsharded_grad'], optim: [] };
const PASSING = ['activation', 'activation_grad', 'kept', 'temp', 'comm'];
const HEADS = { param: ['parameters', 'P'], grad: ['gradients', 'G'], optim: ['optimizer', 'O'] };
const SVG_NS = 'http://www.w3.org/2000/svg';
const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of [children].flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG_NS, tag), attributes, children);

const sumOf = (values) => [...values].reduce((a, b) => a + b, 0);
const path = (d, more, ...inside) => svg('path', { d, ...more }, inside);
const titled = (words, ...inside) => svg('g', {}, svg('title', {}, words), inside);
const f1 = (x) => Number(x.toFixed(1));
const NUMBERS = new Intl.NumberFormat('en');
const num = (n) => NUMBERS.format(n);
const count = (n, one, many) => `${num(n)} ${n === 1 ? one : many || one + 's'}`;
const exact = (n) => `${num(n)} B`;
function bytes(n) {
  for (const [unit, size] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['KB', 1e3]]) {
    if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  }
  return `${n} B`;
}
function listed(names) {
  return names.length < 2 ? names.join('') : `${names.slice(0, -1).join(', ')} and ${names.at(-1)}`;
}
function ranksText(ranks) {
  const few = ranks.length > 8 ? [...ranks.slice(0, 6), `${ranks.length - 6} more`] : ranks;
  return ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${listed(few)}`;
}
const short = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);
const verb = (op) => op.replaceAll('_', '-');
const kindWord = (kind) => (DATA.kinds[kind] ? DATA.kinds[kind].word : kind);
const letterOf = (kind) => (DATA.kinds[kind] ? DATA.kinds[kind].letter : '?');
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// -- colours --
let theme = 'light';
let ink = DATA.themes.light;
const kindColor = (kind) => (DATA.kinds[kind] || DATA.verbs[''])[theme];
const verbColor = (op) => (DATA.verbs[op === 'recv' ? 'send' : op] || DATA.verbs[''])[theme];
const inkOn = (color) => DATA.inks[color];

function hatches(prefix) {
  return svg('defs', {}, Object.entries(DATA.kinds).filter(([, kind]) => kind.hatch).map(([name, kind]) => svg('pattern',
    { id: `${prefix}-${name}`, width: 8, height: 8, patternUnits: 'userSpaceOnUse' },
    path(DATA.tiles[kind.hatch], { fill: 'none', stroke: inkOn(kind[theme]), 'stroke-opacity': 0.3, 'stroke-width': kind.hatch === '..' ? 2 : 1 }))));
}
