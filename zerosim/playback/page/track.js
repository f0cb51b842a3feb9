// Live bytes of a rank over the run's events, with ribbons of phase and unit, collectives, the peak and the cursor.

const TRACK = { left: 62, right: 14, top: 22, ribbon: 17 };

// Of each column, whose moments end at `endOf`, the moment with the most bytes, as bytes by kind.
function columnsOf(run, rank, columns, endOf = (column) => ((column + 1) * run.length) / columns) {
  const ends = Array.from({ length: columns }, (_, column) => endOf(column));
  const kinds = Object.keys(DATA.kinds);
  const now = kinds.map(() => 0);
  let [total, column] = [0, 0];
  let peak = { total: 0, at: 0 };
  let best = { total: 0, values: [...now] };
  const found = [];
  const change = (kind, nbytes) => { now[kinds.indexOf(kind)] += nbytes; total += nbytes; };
  for (let at = 0; column < columns; at += 1) {
    for (; column < columns && at >= ends[column]; column += 1) { found.push(best); best = { total, values: [...now] }; }
    if (at === run.length) { while (column < columns) { found.push(best); column += 1; } break; }
    const [code, whose, , id, ...values] = run.events[at];
    if (whose !== rank || ![ALLOC, FREE, RETAG].includes(code)) continue;
    const { nbytes } = run.byId.get(`${rank}/${id}`);
    if (code !== ALLOC) change(run.kindAt(run.byId.get(`${rank}/${id}`), at), -nbytes);
    if (code !== FREE) change(run.word(values[code === ALLOC ? 1 : 0]), nbytes);
    if (total > best.total) best = { total, values: [...now] };
    if (total > peak.total) peak = { total, at: at + 1 };
  }
  return { kinds, columns: found, peak };
}

// What does not change with the moment: drawn once for a rank, a size and a theme. Beside another run: two curves.
function drawTrack(run, rank, width, height, prefix, peaks, two) {
  const { limit } = run.data;
  const most = limit && limit < 2 * peaks ? Math.max(limit, peaks) : peaks;
  const { left, right, top, ribbon } = TRACK;
  const w = width - left - right;
  const below = 3 * ribbon + 6;
  const h = Math.max(30, height - top - below);
  const columns = Math.max(50, Math.floor(w));
  const { kinds, columns: values, peak } = columnsOf(run, rank, columns);
  const X = (k) => left + (w * k) / run.length;
  const Y = (nbytes) => top + h - (h * nbytes) / most;
  const root = svg('g', {}, rect(left, top, w, h, { fill: ink.band }));
  const beside = (y, words) => root.append(text(left - 6, y, words, { size: 11, color: 'muted', anchor: 'end' }));
  for (const share of [0.5, 1]) {
    root.append(path(`M${left},${f1(Y(most * share))}h${w}`, { stroke: ink.grid, fill: 'none' }));
    beside(Y(most * share) + 4, bytes(Math.round(most * share)));
  }
  beside(top + h, '0');
  const pair = two && two.info.has(rank) ? [run, two] : [];
  pair.forEach((one, index) => {
    const endOf = index ? (column) => two.follow(run, ((column + 1) * run.length) / columns) : undefined; // at the same unit of the step
    const curve = columnsOf(one, rank, columns, endOf).columns.map(({ total }) => total);
    const top2 = curve.indexOf(Math.max(...curve));
    root.append(path(`M${curve.map((total, at) => `${f1(left + ((at + 0.5) * w) / columns)},${f1(Y(total))}`).join('L')}`,
      { fill: 'none', stroke: kindColor(index ? 'grad' : 'param'), 'stroke-width': 2.5, 'stroke-dasharray': index ? '7 3' : null }));
    const y = Y(curve[top2]) + (pair[1 - index].most > one.most ? 18 : -5); // the higher one's above it, the other one's below
    root.append(text(clamp(left + (top2 * w) / columns, left + 90, left + w - 90), clamp(y, 13, top + h - 4), `${one.data.name}: peak ${bytes(curve[top2])}`,
      { size: 12, weight: 700, anchor: 'middle', halo: ink.background }));
  });
  if (limit && limit <= most) root.append(path(`M${left},${f1(Y(limit))}h${w}`, { stroke: ink.text, 'stroke-width': 2, 'stroke-dasharray': '2 3', fill: 'none' }));
  if (limit) root.append(text(left + 4, limit <= most ? Y(limit) + 13 : top + 13, `the device has ${bytes(limit)}${limit <= most ? '' : ', above this axis'}`, { size: 12, halo: ink.background }));
  const lower = new Array(columns).fill(0);
  (pair.length ? [] : kinds).forEach((kind, index) => {
    if (!values.some((column) => column.values[index])) return;
    const up = [];
    const down = [];
    values.forEach((column, at) => {
      const x = f1(left + ((at + 0.5) * w) / columns);
      down.unshift(`${x},${f1(Y(lower[at]))}`);
      lower[at] += column.values[index];
      up.push(`${x},${f1(Y(lower[at]))}`);
    });
    const d = `M${up.join('L')}L${down.join('L')}Z`;
    root.append(path(d, { fill: kindColor(kind) }));
    if (DATA.kinds[kind].hatch) root.append(path(d, { fill: `url(#${prefix}-${kind})` }));
  });
  // Ribbons.
  const spans = (key) => {
    const found = [];
    for (const one of run.ofRank.get(rank)) {
      const last = found.at(-1);
      const name = key(one);
      if (last && last.name === name) last.until = one.until;
      else found.push({ ...one, name });
    }
    return found;
  };
  const phases = spans((one) => (one.step < 0 ? PHASES.init : one.phase === 'init' ? '' : phaseWord(one.phase)));
  const units = spans((one) => one.unit);
  [[phases, 0], [units, 1]].forEach(([list, line]) => {
    const y = top + h + 3 + line * ribbon;
    list.forEach((one, at) => {
      const x = X(one.start);
      const wide = X(one.until) - x;
      const shade = line ? (at % 2 ? 'band' : 'grid') : /^(backward|save|)$/.test(one.name) ? 'grid' : 'band';
      root.append(titled(one.name, rect(x, y, wide, ribbon - 2, { fill: ink[shade], stroke: ink.background, 'stroke-width': 0.5 })));
      if (one.name && wide > one.name.length * 6.4 + 4) root.append(text(x + wide / 2, y + 11.5, one.name, { size: 11, anchor: 'middle' }));
    });
    beside(y + 11.5, line ? 'unit' : 'phase');
  });
  const callY = top + h + 3 + 2 * ribbon;
  beside(callY + 10, 'sends');
  for (const call of run.calls) {
    if (!call.joined.has(rank)) continue;
    const sender = call.op === 'send' && call.joined.get(call.group[0]);
    const start = (sender || call.joined.get(rank)).at; // a posted receive sends nothing
    const end = call.ended.get(rank) ?? start + 1;
    root.append(titled(nameOf(call), rect(X(start), callY, Math.max(2, X(end) - X(start)), ribbon - 4, { fill: verbColor(call.op) })));
  }
  const label = `Live bytes of rank ${rank} over events${pair.length ? `: ${run.data.name} and ${two.data.name}, at the same unit of the step` : ''}`;
  root.append(text(left, 13, label, { size: 12, color: 'muted' }));
  if (pair.length) return { root, X, top, h, height, w, left, most, label };
  const px = X(peak.at);
  const words = `peak ${bytes(peak.total)}`;
  const flip = px > left + w - 110;
  const least = (flip ? px - 130 : px) < left + 225 ? top + 13 : 14; // below the chart's title where they would meet
  root.append(path(`M${f1(px)},${top + h}V${f1(Math.max(6, Y(peak.total) - 12))}`, { stroke: ink.text, 'stroke-width': 1.5 }));
  root.append(text(px + (flip ? -5 : 5), Math.max(least, Y(peak.total) - 4), `⚑ ${words}`, { size: 12, weight: 700, anchor: flip ? 'end' : 'start', halo: ink.background }));
  return { root, X, top, h, height, w, left, most, label };
}

// The cursor, and a chosen buffer's life.
function drawCursor(track, run, k, chosen) {
  const x = f1(track.X(k));
  const group = svg('g', { 'pointer-events': 'none' });
  if (chosen.buffer) {
    const { born, died, kinds } = chosen.buffer;
    const start = track.X(born);
    const end = track.X(Math.min(died, run.length));
    group.append(rect(start, track.top - 8, Math.max(3, end - start), 6, { fill: kindColor(kinds[0][1]), stroke: ink.text, 'stroke-width': 1 }));
    group.append(path(`M${f1(start)},${track.top - 8}v${track.h + 8}M${f1(end)},${track.top - 8}v${track.h + 8}`, { stroke: ink.text, 'stroke-dasharray': '3 3', fill: 'none' }));
  }
  const line = `M${x},${track.top - 4}V${track.height - 2}`;
  group.append(path(line, { stroke: ink.background, 'stroke-width': 5 }), path(line, { stroke: ink.text, 'stroke-width': 2 }),
    path(`M${x},${track.top}l-6,-9h12Z`, { fill: ink.text }));
  return group;
}
