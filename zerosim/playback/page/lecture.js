// The lecture view: one unit on up to four ranks that share its shards, a strip a state, large enough for the last row.

const LECTURE_RANKS = 4;

// The unit that a rank is at, by its row, and the flat buffer behind it: that of a collective without a unit, if it has one.
function unitAt(run, k, rank) {
  const [call] = run.inFlightAt.get(k) || run.endedAt.get(k) || [];
  const flats = (call && !call.unit && run.data.travels[call.index]?.[2]) || [];
  if (flats.length === 1) return { unit: run.data.flats[flats[0]].name, flat: flats[0] };
  const here = (at) => { const { unit } = run.scope(run.events[at]); return (run.data.units[unit] || []).length ? unit : ''; };
  const own = run.own.get(rank);
  const at = own.findLast((one) => one < k && here(one)) ?? own.find(here);
  const unit = at === undefined ? Object.keys(run.data.units)[0] : here(at);
  return { unit, flat: run.data.units[unit][0] };
}

function drawLecture(run, k, { width, height, most, prefix, pick, chosen }) {
  const { unit, flat } = unitAt(run, k, chosen.rank);
  const buffer = run.data.flats[flat];
  const cut = Object.values(buffer.states).find((how) => !how.whole) || Object.values(buffer.states)[0];
  const group = groupOf(run, chosen.rank, cut.axes).filter((rank) => run.info.has(rank));
  const first = Math.max(0, Math.min(group.indexOf(chosen.rank), group.length - LECTURE_RANKS));
  const ranks = group.slice(first, first + LECTURE_RANKS);
  const columns = width > 480 ? ranks.length : width > 260 ? Math.min(2, ranks.length) : 1;
  const lines = Math.ceil(ranks.length / columns);
  const [gap, foot] = [width > 620 ? 20 : 10, 48]; // below the cards: the pill
  const w = (width - 2 - gap * (columns - 1)) / columns;
  const h = Math.max(190, (Math.max(height, 0) - foot - gap * (lines - 1)) / lines);
  const total = lines * h + gap * (lines - 1) + foot;
  const root = svg('svg', { width, height: f1(total), viewBox: `0 0 ${f1(width)} ${f1(total)}`, 'font-family': FONT, role: 'group',
    'aria-label': `${unit}: what each rank holds` }, hatches(prefix));
  const live = run.live(k);
  const boxes = new Map();
  ranks.forEach((rank, index) => {
    const box = { x: 1 + (index % columns) * (w + gap), y: 1 + Math.floor(index / columns) * (h + gap), w, h };
    boxes.set(rank, box);
    root.append(lectureCard(run, k, rank, box, live.get(rank), { unit, flat }, { most, prefix, pick, chosen }));
  });
  const spots = [];
  const flying = run.inFlight(k).filter((call) => call.group.some((rank) => boxes.has(rank)));
  const of = (call) => `${call.op}/${call.axis}/${call.sequence}`; // the same in several groups is one moment
  flying.filter((call) => of(call) === of(flying.at(-1))).forEach((call) => root.append(drawCall(run, k, call, boxes, spots, pick, total - foot / 2 + 2)));
  return root;
}

function lectureCard(run, k, rank, { x, y, w, h }, buffers, { unit, flat }, { most, prefix, pick, chosen }) {
  const pad = 7;
  const inner = w - 2 * pad;
  const tight = inner < 136; // a projector of 4:3
  const byKind = run.byKind(buffers);
  const ofFlat = buffers.filter((buffer) => buffer.flat === flat);
  const passing = run.byKind(buffers.filter((buffer) => PASSING.includes(buffer.kind) && [buffer.unit, run.rowOf(buffer.unit)].includes(unit)));
  const card = svg('g', {}, rect(x, y, w, h, { rx: 6, fill: ink.background, stroke: ink.grid, 'stroke-width': 1.2 }),
    pickable(`r${rank}`, `rank ${rank}`, () => pick({ rank }), text(x + pad, y + 19, `rank ${rank}`, { size: tight ? 11 : 15, weight: 700 }),
      text(x + w - pad, y + 19, bytes(sumOf(byKind.values())), { size: tight ? 11 : 14, weight: 600, anchor: 'end' })),
    byteBar(byKind, DEVICE, x + pad, y + 26, inner, 15, most, prefix));
  const pitch = (h - 48) / 4;
  const strip = clamp(pitch - 22, 14, 44);
  [...STATES, 'passing'].forEach((state, index) => {
    const top = y + 48 + index * pitch;
    const copy = state !== 'passing' && ofFlat.find((buffer) => GATHERED[state].includes(buffer.kind));
    const gathered = copy && (state === 'grad' ? 'whole gradient' : tight ? 'gathered' : kindWord(copy.kind));
    const name = state === 'optim' ? kindWord(state) : (HEADS[state] || [tight ? 'activations' : 'activations, buffers'])[0];
    card.append(text(x + pad, top + 8, gathered || name, { size: 11, color: copy ? 'text' : 'muted', weight: copy ? 700 : 400 }));
    const box = { x: x + pad, y: top + 17, w: inner, h: strip };
    if (state !== 'passing') card.append(drawStrip(run, k, rank, { flat }, state, ofFlat, box, { prefix, pick, chosen }));
    else passingBar(run, passing, unit, box, prefix).forEach((one) => card.append(one));
  });
  return card;
}
