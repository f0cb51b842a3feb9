// What moves between two moments: pieces of a collective fly from rank to rank, and copies that were freed fade. Drawn
// over the picture of the later moment, and gone when it has ended, so that a moment looks the same however it was reached.

function travel(run, before, after, old, now, speed) {
  const calls = run.calls.filter((call) => { const ends = run.arrives.get(call); return ends > before && ends <= after; });
  const boxOf = ({ flat, state, chunk }, rank) => {
    const cell = now.querySelector(`[data-pick="s${rank}.${flat}.${state}.${chunk}"] rect`);
    return cell && ['x', 'y', 'width', 'height'].map((name) => Number(cell.getAttribute(name)));
  };
  const pieces = calls.flatMap((call) => piecesOf(run, call)).map((piece) => ({ ...piece, source: boxOf(piece, piece.from), target: boxOf(piece, piece.to) }))
    .filter(({ source, target }) => source && target);
  const rounds = 1 + Math.max(-1, ...pieces.map(({ round }) => round));
  const each = clamp(2100 / Math.max(1, rounds), 350, 900) / speed;
  const total = Math.max(rounds * each, 700 / speed);
  const layer = svg('g', { class: 'flights', 'aria-hidden': 'true', 'pointer-events': 'none' });
  const hidden = new Set();
  for (const { round, from, to, flat, state, chunk, parts, source, target } of pieces) {
    const adds = state === 'grad' && (calls.every((call) => call.op !== 'all_reduce') || round < rounds / 2);
    const kind = run.data.flats[flat].states[state]?.whole ? state : GATHERED[state].find((name) => run.data.words.includes(name)) || state;
    const [x, y, w, h] = target;
    const label = !adds ? letterOf(kind) : parts > 1 ? `Σ${parts}` : '+';
    const piece = svg('g', { class: 'flight', opacity: 0, 'data-hop': [round, from, to, flat, chunk].join(' ') }, rect(x, y, Math.max(w, 8), h, { fill: kindColor(kind), stroke: ink.background }),
      w < 20 && !adds ? null : text(x + w / 2, w < 20 ? y - 2 : y + h / 2 + 4.5, label, { size: 12, weight: 700, anchor: 'middle', fillColor: w < 20 ? ink.text : inkOn(kindColor(kind)), halo: w < 20 && ink.background }));
    layer.append(piece);
    const away = `translate(${f1(source[0] - x)}px, ${f1(source[1] - y)}px)`;
    piece.animate([{ transform: away, opacity: 0 }, { transform: away, opacity: 1, offset: 0.1 }, { transform: 'none', opacity: 1, offset: 0.85 }, { transform: 'none', opacity: 1 }],
      { duration: each, delay: round * each, fill: adds ? 'backwards' : 'both', easing: 'ease-in-out' });
    const row = run.data.flats[flat].name;
    now.querySelectorAll(`[data-pick^="b${to}."]`).forEach((raised) => { if (raised.getAttribute('aria-label').startsWith(`${row}:`)) hidden.add(raised); });
  }
  const dim = pieces[0]?.state === 'grad' ? 0.4 : 0.12; // whole gradients stay until they are freed
  hidden.forEach((one) => one.animate([{ opacity: dim }, { opacity: dim }], { duration: rounds * each }));
  const ids = new Set([...now.querySelectorAll('[data-pick^=b]')].map((one) => one.getAttribute('data-pick')));
  if (old) {
    for (const one of old.querySelectorAll('[data-pick^=b]')) {
      if (ids.has(one.getAttribute('data-pick'))) continue;
      const ghost = svg('g', { class: 'ghost', opacity: 0 }, [...one.childNodes].map((child) => child.cloneNode(true)));
      layer.append(ghost);
      ghost.animate([{ opacity: 1 }, { opacity: 1, transform: 'none', offset: 0.3 }, { opacity: 0, transform: 'translateY(-14px)' }], { duration: total, fill: 'both' });
    }
  }
  if (!layer.childNodes.length) return 0;
  now.append(layer);
  setTimeout(() => layer.remove(), total + 60);
  return total;
}

// The pieces of a collective of model states: its hops, by rank and flat buffer.
function piecesOf(run, call) {
  const [hops, state, flats] = run.data.travels[call.index] || [0, '', []];
  return flats.flatMap((flat) => run.data.hops[hops].map(([round, from, to, chunk, parts]) => ({ round, chunk, parts, flat, state, from: call.group[from], to: call.group[to] })));
}
