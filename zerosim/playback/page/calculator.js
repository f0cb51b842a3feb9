// The page: controls on one side, bars on the other. It shows what `calculated` returns.
const data = JSON.parse(document.getElementById('data').textContent);
const SIZES = [[1e12, 'TB'], [1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB'], [1, 'B']];
const STAGES = ['0: nothing divided', '1: optimizer states', '2: and gradients', '3: and parameters'];
const RECIPES = { paper: "the ZeRO paper's", usual: 'as people run it' };
const TRAFFIC = ['sent', 'exchanged'];

function made(tag, attributes = {}, ...children) {
  const one = Object.assign(document.createElement(tag), attributes);
  one.append(...children);
  return one;
}

function bytes(value) {
  const [size, unit] = SIZES.find(([size]) => value >= size) || SIZES[4];
  const scaled = value / size;
  return `${scaled.toLocaleString('en', { maximumSignificantDigits: scaled < 1000 ? 3 : 4 })} ${unit}`;
}

const whole = (number) => number.toLocaleString('en');
const powers = (most) => Array.from({ length: Math.floor(Math.log2(most)) + 1 }, (_, power) => 2 ** power);
const modelOf = (point) => data.models.find((one) => one.name === point.model);
const seqsOf = (point) => [...new Set([...powers(modelOf(point).most_seq).slice(7), modelOf(point).most_seq])];

// What a control offers at a point: values, their words, and why one of them is refused.
const CONTROLS = {
  model: { word: 'model', values: () => data.models.map((one) => one.name), shown: (name) => `${name} (${(data.models.find((one) => one.name === name).parameters / 1e9).toPrecision(3)} B)` },
  stage: { word: 'ZeRO stage', values: () => data.grid.stage, shown: (value) => STAGES[value] },
  ranks: { word: 'N (ranks)', values: () => data.grid.ranks, slides: true },
  tp: { word: 'tp', values: () => data.grid.tp, refused: (point, value) => modelOf(point).tp[value].refused },
  precision: { word: 'precision', values: () => data.grid.precision },
  recompute: { word: 'recompute', values: () => data.grid.recompute },
  recipe: { word: 'recipe', values: () => data.grid.recipe, shown: (value) => RECIPES[value] },
  micro_batch: { word: 'microbatch', values: () => powers(64), slides: true },
  seq: { word: 'sequence', values: seqsOf, slides: true },
  gpu: { word: 'GPU', values: () => Object.keys(data.gpus), shown: (name) => `${name} (${bytes(data.gpus[name])})` },
};

const point = { ...data.first };
const controls = {}, main = document.getElementById('calculator');

function control(name) {
  const { word, slides } = CONTROLS[name];
  const input = slides ? made('input', { type: 'range', min: 0, step: 1 }) : made('select');
  const output = made('output');
  input.id = name;
  input.addEventListener('input', () => {
    const values = CONTROLS[name].values(point);
    choose(name, values[slides ? Number(input.value) : input.selectedIndex]);
  });
  controls[name] = { input, output };
  return made('label', { htmlFor: name }, word, slides ? made('span', { className: 'slid' }, input, output) : input);
}

function choose(name, value) {
  point[name] = value;
  settle();
  draw();
  history.replaceState(null, '', '#' + new URLSearchParams(point));
}

// Another model may have shorter rows, or not divide by tp.
function settle() {
  const lists = modelOf(point);
  if (!point.seq) point.seq = lists.seq;
  const seqs = seqsOf(point);
  if (!seqs.includes(point.seq)) point.seq = seqs.findLast((one) => one <= point.seq) || seqs[0];
  if (lists.tp[point.tp].refused) point.tp = 1;
}

function fill(name) {
  const { values, shown = String, refused, slides } = CONTROLS[name], { input, output } = controls[name];
  const list = values(point);
  if (slides) {
    input.max = list.length - 1;
    input.value = list.indexOf(point[name]);
    input.setAttribute('aria-valuetext', whole(point[name]));
    output.textContent = whole(point[name]);
    return;
  }
  input.replaceChildren(...list.map((value) => {
    const why = refused && refused(point, value);
    return made('option', { textContent: why ? `${shown(value)} (not with this model)` : shown(value), disabled: Boolean(why), title: why || '' });
  }));
  input.selectedIndex = list.indexOf(point[name]);
}

function bar(parts, most, limit) {
  const pieces = parts.map(([kind, value]) => {
    const piece = made('i', { className: kind });
    piece.style.width = `${(100 * value) / most}%`;
    return piece;
  });
  const line = made('b');
  line.style.left = `${(100 * limit) / most}%`;
  return made('div', { className: 'bar' }, ...pieces, ...(limit ? [line] : []));
}

function row(word, parts, most, limit, text, total = false) {
  const value = parts.reduce((sum, [, one]) => sum + one, 0);
  const cells = [made('span', { textContent: word }), bar(parts, most, limit), made('span', { className: 'value', textContent: bytes(value), title: `${whole(value)} B` })];
  return made('div', { className: total ? 'row total' : 'row' }, ...cells, ...(text ? [made('span', { className: 'form', textContent: text })] : []));
}

function memoryRows(found, limit) {
  const rows = found.rows.filter((one) => !TRAFFIC.includes(one.subject)), kinds = Object.keys(data.kinds);
  const parts = kinds.map((kind) => {
    const own = rows.filter((one) => one.name === kind);
    const style = kind === 'activation' && !found.exact ? 'estimate' : kind;
    return [kind, style, own.reduce((sum, one) => sum + asNumber(one.value), 0), own.map((one) => one.text).join(' + ')];
  }).filter(([kind, , value]) => value || kind !== 'comm');
  const sum = parts.reduce((all, [, , value]) => all + value, 0), most = Math.max(sum, limit) * 1.02;
  const all = row('together', parts.map(([, style, value]) => [style, value]), most, limit, '', true);
  return [...parts.map(([kind, style, value, text]) => row(data.kinds[kind], [[style, value]], most, limit, text)), all];
}

function trafficRows(found) {
  const rows = found.rows.filter((one) => TRAFFIC.includes(one.subject)).map((one) => ({ ...one, number: asNumber(one.value) })).filter((one) => one.number);
  const sum = rows.reduce((all, one) => all + one.number, 0);
  if (!rows.length) return [made('p', { className: 'muted', textContent: 'Nothing is sent.' })];
  const ofStates = { reduce_scatter: 'grad', all_reduce: 'grad', all_gather: 'param' };
  const kind = (one) => (one.subject === 'exchanged' ? 'activation' : ofStates[one.name] || 'sent');
  const word = (one) => `${data.kinds[kind(one)] || 'others'}${one.axis === 'tp' ? ' over tp' : ''}: ${one.name}`;
  return [...rows.map((one) => row(word(one), [[kind(one), one.number]], sum, 0, one.text)), row('together', rows.map((one) => [kind(one), one.number]), sum, 0, '', true)];
}

function aboutActivations(found) {
  if (found.exact) return 'Activations: the form equals the count of what all blocks save.';
  const words = `Activations (hatched) are an estimate. The form is made for the block of arXiv 2205.05198`;
  if (found.error === undefined) return `${words}, and was not compared with a count here.`;
  const off = found.error ? `gives ${Math.abs(found.error)} % ${found.error < 0 ? 'less' : 'more'} than the count` : 'equals the count to 0.05 %';
  return `${words}. For this model and tp, with one row of ${whole(data.counted_seq)} tokens, it ${off}.`;
}

function aboutLetters(found) {
  const texts = found.rows.filter((one) => one.value[0]).map((one) => one.text).join(' ');
  const names = Object.keys(data.letters).sort((one, other) => other.length - one.length);
  let rest = texts;
  const used = names.filter((name) => { const has = rest.includes(name); rest = rest.replaceAll(name, ' '); return has; });
  const meaning = (name) => data.letters[name === 'Ψ' && point.tp > 1 ? 'Ψ_r' : name];
  return used.sort().map((name) => `${name}: ${meaning(name)}`).join('; ');
}

const shown = Object.fromEntries(['facts', 'memory', 'kept', 'traffic', 'letters', 'command'].map((name) => [name, made(name === 'command' ? 'code' : 'div', { id: name })]));

function draw() {
  Object.keys(CONTROLS).forEach(fill);
  const found = calculated(data, point), limit = data.gpus[point.gpu];
  shown.facts.textContent = `${whole(point.ranks * point.tp)} GPUs: N ${whole(point.ranks)} x tp ${point.tp}. Per GPU, when backward ends. The line is the ${bytes(limit)} of ${point.gpu}.`;
  shown.memory.replaceChildren(...memoryRows(found, limit));
  shown.kept.textContent = aboutActivations(found);
  shown.traffic.replaceChildren(...trafficRows(found));
  shown.letters.textContent = aboutLetters(found);
  shown.command.textContent = commandOf(data, point);
}

async function copy(event) {
  const button = event.currentTarget;
  try {
    await navigator.clipboard.writeText(shown.command.textContent);
    button.textContent = 'copied';
  } catch {
    getSelection().selectAllChildren(shown.command);
    button.textContent = 'press Ctrl-C';
  }
  setTimeout(() => { button.textContent = 'copy'; }, 2000);
}

function fromAddress() {
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (!CONTROLS[name]) continue;
    const value = CONTROLS[name].values(point).find((one) => String(one) === text);
    if (value !== undefined) point[name] = value;
  }
}

shown.facts.className = shown.kept.className = shown.letters.className = 'muted';
shown.memory.setAttribute('role', 'group');
main.replaceChildren(
  made('h1', { textContent: data.title }),
  made('p', { className: 'warned', textContent: 'These bars are not the peak and no verdict. A step also holds logits, gathered units and working memory. The command below counts the peak, and says whether it fits.' }),
  made('div', { className: 'columns' },
    made('fieldset', { ariaLabel: 'What to run' }, ...Object.keys(CONTROLS).map(control)),
    made('div', {},
      made('section', { ariaLabel: 'Memory' }, made('div', { className: 'head' }, made('h2', { textContent: 'Memory' }), shown.facts), shown.memory, shown.kept),
      made('section', { ariaLabel: 'Traffic' }, made('div', { className: 'head' }, made('h2', { textContent: 'Sent in a step' }), made('span', { className: 'muted', textContent: 'bytes that each GPU sends' })), shown.traffic))),
  made('section', { className: 'command', ariaLabel: 'The command that counts it' }, shown.command, made('button', { type: 'button', textContent: 'copy', onclick: copy })),
  shown.letters,
);
settle();
fromAddress();
settle();
draw();
document.documentElement.dataset.ready = 'true';
