// The right column: now, bytes sent, what was chosen, live buffers; and the question of "guess first".

function nowParts(run, k, wide) {
  const event = k ? run.events[k - 1] : null;
  const line = k && run.data.lines.length ? run.data.lines[k - 1] : -1;
  const source = line < 0 ? null : run.data.sources[line];
  return { where: event ? whereText(run, event) : 'before the first event', words: sentence(run, k, wide), source };
}

function sourceBlock(source) {
  if (!source) return html('p', { class: 'source none' }, 'No source line frees a buffer: Python frees it when no name refers to it.');
  const [file, number, name, code] = source;
  return html('p', { class: 'source' }, html('span', { class: 'muted' }, `${file}:${number} · ${name}`), html('code', {}, code));
}

// Bytes that a rank has sent for model states, beside the closed form.
function gauge(run, rank, k, name) {
  const { volume } = run.info.get(rank);
  const sent = run.sentBytes(rank, k);
  const { unit } = volume;
  const most = Math.max(volume.bytes, sent, 3.15 * unit, 1);
  const width = 400;
  const X = (nbytes) => (width * nbytes) / most;
  const root = svg('svg', { viewBox: `0 0 ${width} 34`, class: 'gauge', role: 'img', 'font-family': FONT,
    'aria-label': `rank ${rank} has sent ${exact(sent)} of ${exact(volume.bytes)}` },
  rect(0, 2, width, 14, { fill: ink.band }), rect(0, 2, X(sent), 14, { fill: verbColor('all_gather') }));
  for (let times = 1; times <= 3 && unit > 0; times += 1) {
    root.append(path(`M${f1(X(times * unit))},0v19`, { stroke: ink.text, 'stroke-width': 1.2 }));
    root.append(text(X(times * unit), 31, `${times > 1 ? times : ''}Ψ`, { size: 13, anchor: 'middle', color: 'muted' }));
  }
  if (volume.bytes) root.append(path(`M${f1(X(volume.bytes) - 1)},0v18`, { stroke: ink.text, 'stroke-width': 3 }));
  return html('section', { class: 'sent' }, html('h2', {}, `${name ? `${name}: ` : ''}rank ${rank} has sent ${bytes(sent)} in this step`), root, html('p', { class: 'muted' }, volume.text));
}

function row(name, ...value) { return [html('dt', {}, name), html('dd', {}, ...value)]; }

function detail(run, k, chosen, pick) {
  const close = html('button', { class: 'close', title: 'Close (Esc)', 'aria-label': 'Close', onclick: () => pick({}) }, '×');
  if (chosen.shard) {
    const { rank, flat, state, shard } = chosen.shard;
    const one = run.data.flats[flat];
    const how = one.states[state];
    const [start, stop] = how.whole ? [0, one.numel] : how.parts[shard];
    const real = Math.max(0, Math.min(stop, one.numel) - start);
    const owner = how.whole ? 'every rank of the group' : ownerOf(run, rank, how.axes, shard);
    const who = how.whole ? owner : typeof owner === 'number' ? `rank ${owner}` : `the rank ${owner}`;
    return html('section', { class: 'detail' }, close, html('h2', {}, `${one.name}: ${HEADS[state][0]}`), html('dl', {},
      row('owner', who), row('elements', `${num(start)} to ${num(stop - 1)} of ${num(one.numel)}`),
      row('that is', `${count(real, 'element')}${stop - start > real ? `, and ${count(stop - start - real, 'element')} of padding` : ''}`),
      row('cut over', how.whole ? 'not cut: every rank holds all of it' : `${how.axes.map((axis) => run.axis(axis)).join(' + ')}: shard ${shard} of ${how.parts.length}`)));
  }
  if (chosen.call !== undefined) {
    const call = run.calls[chosen.call];
    const there = call.group.filter((rank) => run.info.has(rank));
    const state = (rank) => {
      if (!call.joined.has(rank) || call.joined.get(rank).at >= k) return 'has not joined yet';
      return call.ended.get(rank) < k ? 'has its result' : 'has joined and waits';
    };
    const missing = call.op === 'send' ? [] : run.missingFrom(call, k);
    const joined = run.joinedBy(call, k);
    return html('section', { class: 'detail' }, close, html('h2', {}, nameOf(call)),
      html('p', {}, missing.length && joined.length ? `${ranksText(joined)} ${joined.length > 1 ? 'wait' : 'waits'} for ${ranksText(missing)}.` : missing.length ? 'Nobody has joined yet.' : `${resultOf(call)}.`),
      html('dl', {}, there.map((rank) => row(`rank ${rank}`, `${state(rank)}: sends ${exact(call.joined.get(rank) ? call.joined.get(rank).sent : 0)}`)),
        row('over', `${run.axis(call.axis)}, ${count(call.group.length, 'rank')}`), row('purpose', call.purpose), row('made by', call.algorithm)));
  }
  if (chosen.buffer) {
    const { rank, nbytes, born, died, kinds, unit, name } = chosen.buffer;
    const phase = (at) => whereText(run, run.events[at]);
    return html('section', { class: 'detail' }, close, html('h2', {}, bufferName(chosen.buffer, kinds[0][1])), html('dl', {},
      row('on', `rank ${rank}${whereLies(chosen.buffer)}`), row('bytes', num(nbytes)), row('unit', unit || 'none'), row('what', name || kindWord(kinds[0][1])),
      row('kind', kinds.map(([, kind]) => kindWord(kind)).join(', then ')),
      row('born', `event ${num(born + 1)}: ${phase(born)}`),
      row('died', died === Infinity ? 'lives to the end of the record' : `event ${num(died + 1)}: ${phase(died)}`)));
  }
  return null;
}

const MOST_LISTED = 60;
function liveList(run, rank, buffers, chosen, pick, choose) {
  const total = buffers.reduce((sum, buffer) => sum + (buffer.memory === DEVICE ? buffer.nbytes : 0), 0);
  const ordered = [...buffers].sort((a, b) => b.nbytes - a.nbytes || a.id - b.id);
  const items = ordered.slice(0, MOST_LISTED).map((buffer) => {
    const chip = html('span', { class: 'chip', 'aria-hidden': 'true' }, letterOf(buffer.kind));
    chip.style.background = kindColor(buffer.kind);
    chip.style.color = inkOn(kindColor(buffer.kind));
    const isChosen = chosen.buffer === buffer.whole;
    return html('li', {}, html('button', { class: isChosen ? 'chosen' : '', 'data-pick': `l${rank}.${buffer.id}`, onclick: () => pick({ buffer: buffer.whole }) },
      chip, html('span', { class: 'name' }, bufferName(buffer, buffer.kind)), html('span', { class: 'size' }, bytes(buffer.nbytes))));
  });
  if (ordered.length > MOST_LISTED) items.push(html('li', { class: 'muted' }, `and ${ordered.length - MOST_LISTED} more`));
  const select = html('select', { 'aria-label': 'Rank', onchange: (event) => choose(Number(event.target.value)) },
    run.ranks.map((one) => html('option', { value: one, selected: one === rank }, `rank ${one}`)));
  return html('section', { class: 'live' }, html('h2', {}, 'Live on ', select, `: ${count(buffers.length, 'buffer')}, ${bytes(total)}`), html('ul', {}, items));
}

// "Guess first": what comes next, among what else there is in this run.
const guessName = (call) => `${verb(call.op)}${call.unit ? ` of ${call.unit}` : ` (${call.purpose})`}`;
function choicesOf(run, call) {
  const right = guessName(call);
  const others = [];
  const add = (one) => {
    const name = one && guessName(one);
    if (name && name !== right && !others.includes(name) && others.length < 3) others.push(name);
  };
  add(run.calls.find((one) => one.unit === call.unit && one.op !== call.op));
  for (let far = 1; far < run.calls.length; far += 1) [call.index - far, call.index + far].forEach((at) => add(run.calls[at]));
  ['reduce-scatter', 'all-gather', 'all-reduce'].forEach((op) => add({ op, unit: call.unit, purpose: call.purpose }));
  return { right, names: [right, ...others].sort() };
}
function questionPart(question, answer, score) {
  if (!question) return null;
  return html('section', { class: 'question', role: 'group', 'aria-label': 'Guess first' }, html('h2', {}, 'Which collective comes next?'),
    html('div', {}, question.names.map((name, index) => html('button', { 'data-pick': `g${index}`, onclick: () => answer(name) }, name))),
    html('p', { class: 'muted' }, `${score.right} of ${score.asked} right so far.`));
}
