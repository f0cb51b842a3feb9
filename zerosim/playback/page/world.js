// The ranks at a moment: a card a rank, a strip a unit, a byte bar; arrows while a collective is in flight.

const LABEL = 58;
const LEAST = 10.5; // of type

// Rows of a card: flat buffers in the model's order, then units that hold bytes and no buffer of their own.
function rowsOf(run, rank) {
  if (run.rowCache.has(rank)) return run.rowCache.get(rank);
  const info = run.info.get(rank);
  const here = new Set(run.data.stages[info.stage]);
  const rows = [];
  const placed = new Set();
  for (const [unit, flats] of Object.entries(run.data.units)) {
    const own = flats.filter((flat) => here.has(flat));
    if (!own.length) continue;
    const fresh = own.filter((flat) => !placed.has(flat));
    fresh.forEach((flat) => { placed.add(flat); rows.push({ name: run.data.flats[flat].name, flat, unit }); });
    if (!fresh.length && run.visited.has(`${rank}/${unit}`)) rows.push({ name: unit, flat: null, unit });
  }
  const named = new Set(rows.map((one) => one.name));
  const isElsewhere = (buffer) => buffer.rank === rank && buffer.memory === DEVICE && PASSING.includes(buffer.kinds[0][1]) && buffer.nbytes * 25 > run.mostPassing && !named.has(buffer.unit) && !named.has(run.rowOf(buffer.unit));
  if (run.buffers.some(isElsewhere)) rows.push({ name: 'other', flat: null, unit: null });
  return run.rowCache.set(rank, rows).get(rank);
}

// Where cards stand: a pipeline's stages in columns, else the fastest axis of several; ranks of one axis as they fit.
function arrange(run, width, height, gap) {
  const axes = Object.keys(run.data.mesh);
  const column = !height && width < 520 ? null : axes.includes('pp') ? 'pp' : axes.length > 1 ? axes.at(-1) : null;
  const n = run.ranks.length;
  const lines = Math.max(...run.ranks.map((rank) => rowsOf(run, rank).length));
  if (column) {
    const values = [...new Set(run.ranks.map((rank) => run.info.get(rank).place[column]))].sort((a, b) => a - b);
    const others = (rank) => axes.filter((axis) => axis !== column).map((axis) => `${run.axis(axis)} ${run.info.get(rank).place[axis]}`).join(', ');
    const names = [...new Set(run.ranks.map(others))];
    const cells = run.ranks.map((rank) => ({ rank, x: values.indexOf(run.info.get(rank).place[column]), y: names.indexOf(others(rank)) }));
    return { columns: values.length, rows: names.length, cells, lines,
      heads: values.map((value) => (column === 'pp' ? `pipeline stage ${value}` : `${run.axis(column)} ${value}`)), sides: names };
  }
  let best = { score: -1 };
  for (let columns = 1; columns <= n; columns += 1) {
    const rows = Math.ceil(n / columns);
    if (!height && width < 520 && columns > 1) break;
    const w = (width - gap * (columns - 1)) / columns;
    const h = height ? (height - gap * (rows - 1)) / rows : 400;
    const score = Math.min(w / 330, h / (62 + run.memories.size * 17 + lines * 15)) * (n % columns ? 0.75 : 1);
    if (score > best.score) best = { score, columns, rows };
  }
  const cells = run.ranks.map((rank, index) => ({ rank, x: index % best.columns, y: Math.floor(index / best.columns) }));
  return { ...best, cells, lines, heads: [], sides: [] };
}

function drawWorld(run, k, { width, height, most, prefix, pick, chosen, title }) {
  const gap = width < 560 ? 18 : 34; // between cards: room for arrows
  const plan = arrange(run, width, height, gap);
  const top = (title ? 24 : 0) + (plan.heads.length ? 20 : 0);
  const left = plan.sides.length > 1 ? 22 : 0;
  const gapX = plan.heads[0] && plan.heads[0].startsWith('pipeline') && width > 500 ? 68 : gap;
  const cardW = (width - left - 2 - gapX * (plan.columns - 1)) / plan.columns;
  const more = run.memories.size * 17; // bars of other memories
  const natural = 66 + more + plan.lines * 17;
  const gapY = plan.rows > 1 ? gap : 0;
  const cardH = height ? Math.max(90, Math.min((height - top - 4 - gapY * (plan.rows - 1)) / plan.rows, 66 + more + plan.lines * 34)) : natural;
  const total = top + plan.rows * cardH + gapY * (plan.rows - 1) + 4;
  const root = svg('svg', { width, height: Math.ceil(total), viewBox: `0 0 ${width} ${Math.ceil(total)}`, 'font-family': FONT,
    role: 'group', 'aria-label': `${run.data.about}: what each rank holds` }, hatches(prefix));
  if (title) root.append(text(1, 16, title, { size: 15, weight: 600 }));
  plan.heads.forEach((head, index) => root.append(text(left + index * (cardW + gapX) + cardW / 2, top - 6, head, { size: 12, color: 'muted', anchor: 'middle' })));
  if (left) plan.sides.forEach((side, index) => {
    const y = top + index * (cardH + gapY) + cardH / 2;
    root.append(text(14, y, side, { size: 12, color: 'muted', anchor: 'middle', transform: `rotate(-90 14 ${y})` }));
  });
  const live = run.live(k);
  const flying = run.inFlight(k);
  const boxes = new Map();
  for (const { rank, x, y } of plan.cells) {
    const box = { x: left + 1 + x * (cardW + gapX), y: top + 1 + y * (cardH + gapY), w: cardW, h: cardH };
    boxes.set(rank, box);
    root.append(drawCard(run, k, rank, box, live.get(rank), { most, prefix, pick, chosen }));
  }
  const spots = [];
  for (const call of flying.slice(-6)) root.append(drawCall(run, k, call, boxes, spots, pick));
  return root;
}

function text(x, y, words, { size = 12, weight = 400, color = 'text', anchor = 'start', fillColor, transform, halo } = {}) {
  return svg('text', { x: f1(x), y: f1(y), 'font-size': size, 'font-weight': weight, 'text-anchor': anchor, transform,
    fill: fillColor || ink[color], 'paint-order': halo && 'stroke', stroke: halo, 'stroke-width': halo && 3,
    'stroke-linejoin': halo && 'round' }, String(words));
}

// What a click, or Enter, chooses.
const pickable = (id, words, onclick, ...children) => svg('g', { class: 'pick', role: 'button', tabindex: '-1', 'data-pick': id, 'aria-label': words, onclick }, children);

const rect = (x, y, w, h, more) => svg('rect', { x: f1(x), y: f1(y), width: f1(Math.max(0, w)), height: f1(Math.max(0, h)), ...more });

// A filled area in a kind's colour, hatch and letter; in another memory faint, with that memory's letter.
function area(kind, x, y, w, h, prefix, away) {
  const color = kindColor(kind);
  const parts = [rect(x, y, w, h, away ? { fill: ink.background, stroke: color, 'stroke-width': 1.5 } : { fill: color })];
  if (!away && DATA.kinds[kind] && DATA.kinds[kind].hatch && w > 3) parts.push(rect(x, y, w, h, { fill: `url(#${prefix}-${kind})` }));
  const size = Math.min(12, h - 0.5);
  if ((w >= size || away) && size >= LEAST) {
    parts.push(text(x + w / 2, y + h / 2 + size * 0.36, away ? away.toUpperCase() : letterOf(kind), { size, weight: 700, anchor: 'middle', fillColor: away ? ink.text : inkOn(color), halo: !away && color }));
  }
  return parts;
}

function drawCard(run, k, rank, box, buffers, { most, prefix, pick, chosen }) {
  const { x, y, w, h } = box;
  const info = run.info.get(rank);
  const byKind = run.byKind(buffers);
  const total = sumOf(byKind.values());
  const own = buffers.filter((buffer) => buffer.memory === DEVICE);
  const ofFlat = byFlat(run, buffers);
  const isChosen = chosen.rank === rank;
  const label = `rank ${rank}: ${exact(total)} live`;
  const card = svg('g', {}, rect(x, y, w, h, { rx: 6, fill: ink.background, stroke: isChosen ? ink.text : ink.grid, 'stroke-width': isChosen ? 2 : 1.2 }));
  const head = pickable(`r${rank}`, label, () => pick({ rank }),
    rect(x + 1, y + 1, w - 2, 24, { fill: 'transparent' }));
  const pad = 9;
  const times = info.stands_for > 1 ? ` × ${num(info.stands_for)}` : '';
  head.append(text(x + pad, y + 19, `rank ${rank}${times}`, { size: 14, weight: 700 }));
  const place = Object.entries(info.place).map(([axis, at]) => `${run.axis(axis)} ${at}`).join(', ');
  if (Object.keys(run.data.mesh).length > 1 && w > 330) head.append(text(x + pad + 62 + times.length * 8, y + 19, short(place, Math.floor((w - 190) / 6.5)), { size: 11, color: 'muted' }));
  head.append(text(x + w - pad, y + 19, bytes(total), { size: 14, weight: 600, anchor: 'end' }));
  card.append(head);
  // The byte bar.
  const barY = y + 26;
  const barH = h > 150 ? 15 : 11;
  const barW = w - 2 * pad;
  card.append(...byteBar(byKind, DEVICE, x + pad, barY, barW, barH, most, prefix));
  const peakX = x + pad + (barW * info.peak) / most;
  card.append(path(`M${f1(peakX)},${barY - 2}v${barH + 4}`, { stroke: ink.text, 'stroke-width': 1.5, 'stroke-dasharray': '2 2' }, svg('title', {}, `this rank's peak: ${exact(info.peak)}`)));
  let y0 = barY + barH + 4;
  const levels = new Map([[DEVICE, barY + barH / 2]]); // of the bars
  for (const [memory, mostThere] of run.memories) {
    const there = run.byKind(buffers, memory);
    const labelW = Math.min(96, barW * 0.42);
    card.append(text(x + pad, y0 + 11, `${memory} ${bytes(sumOf(there.values()))}`, { size: 11, color: 'muted' }),
      ...byteBar(there, memory, x + pad + labelW, y0 + 2, barW - labelW, 11, mostThere, prefix));
    levels.set(memory, y0 + 7);
    y0 += 17;
  }
  copiesOf(run, rank, k).forEach(([source, target, nbytes], index) => {
    const [from, to] = [levels.get(source), levels.get(target)];
    const ax = x + w - pad - 14 - index * 84;
    card.append(arrow(ax, from, ax, to - 5 * Math.sign(to - from), ink.text), tag(ax - 42, (from + to) / 2, bytes(nbytes), ink.text));
  });
  // Strips.
  const rows = rowsOf(run, rank);
  const labelW = Math.min(LABEL, Math.max(34, w * 0.17));
  const inner = w - 2 * pad - labelW;
  const gap = inner > 240 ? 10 : 5;
  const stripW = (inner - 3 * gap) / 4;
  const columnX = (index) => x + pad + labelW + index * (stripW + gap);
  const words = stripW >= 68;
  if (y0 + 14 + 9 * 3 < y + h) {
    STATES.forEach((state, index) => card.append(text(columnX(index), y0 + 10, HEADS[state][words ? 0 : 1], { size: LEAST, color: 'muted' })));
    card.append(text(columnX(3), y0 + 10, words ? 'activations' : 'A', { size: LEAST, color: 'muted' }));
    y0 += 15;
  }
  const room = y + h - y0 - 5;
  const limit = Math.max(1, Math.floor(room / 12));
  const scopeUnit = k ? run.scope(run.events[k - 1]).unit : '';
  let shown = rows;
  if (rows.length > limit) {
    const active = Math.max(0, rows.findIndex((row) => row.name === scopeUnit || row.unit === scopeUnit || run.rowOf(scopeUnit) === row.name));
    const first = clamp(active - Math.floor((limit - 1) / 2), 0, rows.length - limit + 1);
    shown = [...rows.slice(first, first + limit - 1), { name: `+ ${rows.length - limit + 1}`, rest: true }];
  }
  const pitch = clamp(room / shown.length, 12, 30);
  const named = new Set(rows.map((row) => row.name));
  const stripH = clamp(pitch - (pitch > 17 ? 6 : 3), 8, 20);
  const passingOf = new Map(); // by row; null: of units without one
  for (const buffer of own) {
    if (!PASSING.includes(buffer.kind)) continue;
    const name = [buffer.unit, run.rowOf(buffer.unit)].find((one) => named.has(one)) || null;
    if (!passingOf.has(name)) passingOf.set(name, []);
    passingOf.get(name).push(buffer);
  }
  shown.forEach((row, index) => {
    const rowY = y0 + index * pitch + (pitch - stripH) / 2;
    const now = !row.rest && scopeUnit && (row.name === scopeUnit || row.name === run.rowOf(scopeUnit));
    if (now) card.append(rect(x + 3, rowY - (pitch - stripH) / 2, w - 6, pitch, { fill: ink.band, rx: 3 }));
    card.append(text(x + pad, rowY + stripH / 2 + 4, short(row.name, Math.floor(labelW / 6.8)), { size: clamp(stripH, LEAST, 12), color: now || row.flat !== null ? 'text' : 'muted', weight: now ? 700 : 400 }));
    if (row.rest) return;
    if (row.flat !== null) {
      STATES.forEach((state, column) => {
        card.append(drawStrip(run, k, rank, row, state, ofFlat.get(row.flat) || [], { x: columnX(column), y: rowY, w: stripW, h: stripH }, { prefix, pick, chosen }));
      });
    } else if (run.data.units[row.unit]) {
      const names = run.data.units[row.unit].map((flat) => run.data.flats[flat].name);
      card.append(text(columnX(0) + 2, rowY + stripH / 2 + 4, short(`uses ${names.join(', ')}’s`, Math.floor((3 * stripW) / 5.5)), { size: 11, color: 'muted' }));
    }
    const passing = run.byKind(passingOf.get(row.unit === null ? null : row.name) || []);
    card.append(...passingBar(run, passing, row.name, { x: columnX(3), y: rowY + 1, w: stripW, h: stripH - 2 }, prefix));
  });
  return card;
}

// A unit's bytes that pass, on a scale common to all units and ranks.
function passingBar(run, byKind, name, { x, y, w, h }, prefix) {
  return [...byKind].map(([kind, nbytes]) => {
    const wide = (w * nbytes) / run.mostPassing;
    x += wide;
    return titled(`${kindWord(kind)}${ofUnit(name)}: ${exact(nbytes)}`, area(kind, x - wide, y, wide, h, prefix));
  });
}

// Live buffers by the flat buffer that they are of.
function byFlat(run, buffers) {
  const found = new Map();
  for (const buffer of buffers) {
    if (!found.has(buffer.flat)) found.set(buffer.flat, []);
    found.get(buffer.flat).push(buffer);
  }
  return found;
}

// A memory's bytes by kind, on a scale common to all ranks.
function byteBar(byKind, memory, x, y, w, h, most, prefix) {
  let at = x;
  return [rect(x, y, w, h, { fill: ink.band, rx: 2 }), ...[...byKind].map(([kind, nbytes]) => {
    const wide = (w * nbytes) / most;
    at += wide;
    return titled(`${kindWord(kind)}${whereLies({ memory })}: ${exact(nbytes)}`, area(kind, at - wide, y, wide, h, prefix));
  })];
}

// Bytes of a rank's copies in flight at k, by source and target.
function copiesOf(run, rank, k) {
  const found = {};
  for (const { source, target, nbytes, at, end } of run.copies.get(rank)) {
    const way = `${source}/${target}`;
    if (at < k && end >= k) found[way] = [source, target, nbytes + (found[way] ? found[way][2] : 0)];
  }
  return Object.values(found);
}

// One state of one flat buffer, cut into its shards: filled on this rank, outlined on another, raised where gathered.
// What lies in another memory of this rank is filled faintly, with the memory's letter.
function drawStrip(run, k, rank, row, state, buffers, { x, y, w, h }, { prefix, pick, chosen }) {
  const flat = run.data.flats[row.flat];
  const group = svg('g');
  const how = flat.states[state];
  if (!how) return group;
  const mine = buffers.filter((buffer) => buffer.memory === DEVICE);
  const there = buffers.find((buffer) => buffer.kind === state && buffer.memory !== DEVICE);
  const onDevice = mine.some((buffer) => buffer.kind === state);
  const isHere = onDevice || there !== undefined;
  const index = groupOf(run, rank, how.axes).indexOf(rank);
  const cut = how.whole ? (Object.values(flat.states).find((one) => !one.whole && one.parts.every(([a, b]) => b > a)) || how) : how;
  const n = cut.parts.length;
  const whole = Math.max(...cut.parts.map(([, stop]) => stop), flat.numel);
  const parts = cut.whole ? Array.from({ length: n }, (_, at) => [(at * whole) / n, ((at + 1) * whole) / n]) : cut.parts;
  const gathered = mine.filter((buffer) => GATHERED[state].includes(buffer.kind));
  const coming = gathered.length > 0 && gathered[0].filled >= k;
  const outline = run.data.words.includes(state) ? kindColor(state) : ink.grid; // where nobody ever holds it, faint
  if (n > 16) group.append(rect(x + 0.5, y + 0.5, w - 1, h - 1, { fill: 'none', stroke: outline, 'stroke-opacity': 0.55 }));
  parts.forEach(([start, stop], shard) => {
    if (stop <= start || (n > 16 && shard !== index)) return;
    const sx = x + (w * start) / whole;
    const sw = (w * (stop - start)) / whole - (n > 1 && w / n > 4 ? 1 : 0);
    const held = isHere && (how.whole || shard === index);
    const words = `${flat.name} ${HEADS[state][0]}, shard ${shard} of ${n}, ${held ? `held here${onDevice ? '' : whereLies(there)}` : `held by ${how.whole ? 'every rank of the group' : `rank ${ownerOf(run, rank, how.axes, shard)}`}`}`;
    const cell = pickable(`s${rank}.${row.flat}.${state}.${shard}`, words, () => pick({ shard: { rank, flat: row.flat, state, shard } }));
    if (held) cell.append(...area(state, sx, y, sw, h, prefix, onDevice ? '' : there.memory[0]));
    else cell.append(rect(sx + 0.5, y + 0.5, sw - 1, h - 1, { fill: 'transparent', stroke: outline, 'stroke-opacity': 0.55 }));
    if (chosen.shard && chosen.shard.flat === row.flat && chosen.shard.state === state && chosen.shard.shard === shard) {
      cell.append(rect(sx - 1.5, y - 1.5, sw + 3, h + 3, { fill: 'none', stroke: ink.text, 'stroke-width': 2 }));
    }
    group.append(cell);
  });
  if (gathered.length) {
    const lift = Math.min(h > 20 ? 6 : 4, h / 4);
    const kind = gathered[0].kind;
    const raised = pickable(`b${rank}.${gathered[0].id}`, `${flat.name}: ${kindWord(kind)}${coming ? ', on their way' : ''}`, () => pick({ buffer: gathered[0].whole }));
    if (!coming) raised.append(rect(x + 1.5, y + 1.5 - lift, w, h - 1, { fill: '#000', 'fill-opacity': 0.28, rx: 2 }));
    if (coming) raised.append(rect(x - 1, y - lift, w, h - 1, { fill: 'transparent', stroke: kindColor(kind), 'stroke-width': 1.5, 'stroke-dasharray': '4 3', rx: 2 }));
    else {
      parts.forEach(([start, stop]) => {
        if (stop > start) raised.append(...area(kind, x - 1 + (w * start) / whole, y - lift, (w * (stop - start)) / whole - 0.6, h - 1, prefix));
      });
    }
    group.append(raised);
  }
  return group;
}

// The ranks that share a state's shards with this one, in the order of these.
const groupOf = (run, rank, axes) => run.data.groups[axes.join('+')].find((group) => group.includes(rank));

// The rank that holds a shard in this rank's group.
function ownerOf(run, rank, axes, shard) {
  const found = groupOf(run, rank, axes)[shard];
  return run.info.has(found) ? found : `with index ${shard}`;
}

// A collective: its members' cards have its colour, and a pill between them its name and bytes.
function drawCall(run, k, call, boxes, spots, pick, below) {
  const members = call.group.filter((rank) => boxes.has(rank));
  const color = verbColor(call.op);
  const group = svg('g');
  const [first] = call.joined.values();
  if (call.op === 'send' && members.length === 2) {
    group.append(drawMessage(call, members.map((rank) => boxes.get(rank)), first, spots, color, pick));
    return group;
  }
  const joined = run.joinedBy(call, k);
  const all = members.map((rank) => boxes.get(rank));
  const middle = (at, size) => (Math.min(...all.map((box) => box[at])) + Math.max(...all.map((box) => box[at] + box[size]))) / 2;
  const mx = middle('x', 'w');
  const missing = run.missingFrom(call, k);
  const each = [...call.joined.values()];
  const same = each.every(({ sent, received }) => sent === first.sent && received === first.received);
  const name = nameOf(call);
  const second = missing.length ? `waits for ${ranksText(missing)}` : same ? `each ↑ ${bytes(first.sent)}${first.received === null ? '' : ` ↓ ${bytes(first.received)}`}` : `${bytes(first.payload)} of ${first.dtype}`;
  const half = Math.max(name.length * 7.6 + 26, second.length * 6.4 + 26) / 2;
  // Never over a rank's name and bytes, nor over another pill.
  const heads = run.memories.size * 17 + 46;
  const onHead = (y) => [...boxes.values()].find((box) => Math.abs(box.x + box.w / 2 - mx) < half + box.w / 2 && y + 20 > box.y + 7 && y - 20 < box.y + heads);
  let my = below || middle('y', 'h');
  while (!below && (spots.some(([sx, sy]) => Math.abs(sx - mx) < 2 * half && Math.abs(sy - my) < 44) || onHead(my))) my += 2;
  const named = below && spots.some(([sx]) => Math.abs(sx - mx) < 2 * half); // by the pill of another group
  spots.push([mx, my]);
  for (const rank of members) {
    const box = boxes.get(rank);
    const here = joined.includes(rank);
    group.append(rect(box.x, box.y, box.w, box.h, { rx: 6, fill: 'none', class: here ? 'flow' : null, stroke: here ? color : ink.muted, 'stroke-width': here ? 3.5 : 1.5, 'stroke-dasharray': here ? '9 5' : '2 5', 'pointer-events': 'none' }));
    const cy = clamp(my, box.y + 30, box.y + box.h - 30);
    if (here && !same) {
      const { sent, received } = call.joined.get(rank);
      const parts = [sent ? `↑ ${run.load(call, sent, bytes)}` : '', received ? `↓ ${run.load(call, received, bytes)}` : ''].filter(Boolean).join(' ');
      const room = parts.length * 3.1 + 8;
      if (parts && members.length > 1) group.append(tag(clamp(mx, box.x + room, box.x + box.w - room), Math.abs(cy - my) < 30 ? cy + 34 : cy, parts, color));
    }
  }
  if (!named) group.append(pickable(`c${call.index}`, `${name}: ${second}`, () => pick({ call: call.index }),
    rect(mx - half, my - 20, 2 * half, 40, { rx: 20, fill: color, stroke: ink.background, 'stroke-width': 2 }),
    text(mx, my - 3, name, { size: 13, weight: 700, anchor: 'middle', fillColor: inkOn(color) }),
    text(mx, my + 12, second, { size: 11.5, anchor: 'middle', fillColor: inkOn(color) })));
  return group;
}

// An arrow with a head at its end, on a line of the background's colour.
function arrow(x0, y0, x1, y1, color) {
  const turn = (Math.atan2(y1 - y0, x1 - x0) * 180) / Math.PI;
  const d = `M${f1(x0)},${f1(y0)}L${f1(x1)},${f1(y1)}`;
  return svg('g', { 'pointer-events': 'none' }, path(d, { stroke: ink.background, 'stroke-width': 9 }),
    path(d, { class: 'flow', stroke: color, 'stroke-width': 4, 'stroke-dasharray': '9 5' }),
    path('M10,0L-6,-9V9Z', { fill: color, stroke: ink.background, 'stroke-width': 1.5, transform: `translate(${f1(x1)} ${f1(y1)}) rotate(${f1(turn)})` }));
}

// A message: from card to card, with its bytes between them.
function drawMessage(call, [from, to], { payload }, spots, color, pick) {
  const centre = (box) => [box.x + box.w / 2, box.y + box.h / 2];
  const [[fx, fy], [tx, ty]] = [centre(from), centre(to)];
  const level = Math.abs(tx - fx) > Math.abs(ty - fy);
  const mid = (a, b) => (a + b) / 2;
  let y = mid(fy, ty) - 12;
  const x = level ? mid(Math.min(from.x + from.w, to.x + to.w), Math.max(from.x, to.x)) : mid(fx, tx);
  while (spots.some(([sx, sy]) => Math.abs(sx - x) < 80 && Math.abs(sy - y) < 34)) y += 36;
  spots.push([x, y]);
  const way = Math.sign(level ? tx - fx : ty - fy) || 1;
  const line = level ? arrow(x - way * 34, y + 17, x + way * 26, y + 17, color) : arrow(x, y - way * 34, x, y + way * 34, color);
  const words = bytes(payload);
  const half = words.length * 3.6 + 9;
  return pickable(`c${call.index}`, `${nameOf(call)}: ${words}`, () => pick({ call: call.index }), line,
    rect(x - half, y - 9, 2 * half, 18, { rx: 9, fill: color, stroke: ink.background, 'stroke-width': 1.5 }),
    text(x, y + 4, words, { size: 11.5, weight: 600, anchor: 'middle', fillColor: inkOn(color) }));
}

function tag(x, y, words, color) {
  const w = words.length * 6.1 + 12;
  return svg('g', { 'pointer-events': 'none' }, rect(x - w / 2, y - 9, w, 18, { rx: 9, fill: ink.background, stroke: color, 'stroke-width': 1.5 }),
    text(x, y + 4, words, { size: 11, weight: 600, anchor: 'middle' }));
}
