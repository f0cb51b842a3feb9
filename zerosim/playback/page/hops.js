// Who sends what to whom in a collective of n members, as comm/algorithms/ring.py and direct.py do: in each round the
// members `from` and `to`, the chunk, and how many members' gradients the piece has added up (1 where none are added).

function hopsOf(op, algorithm, n, root) {
  const ring = algorithm === 'ring';
  const members = [...Array(n).keys()];
  const at = (place) => ((place % n) + n) % n;
  const rounds = [...Array(ring ? n - 1 : Math.min(1, n - 1)).keys()];
  const hops = (parts, chunk) => rounds.flatMap((round) => members.flatMap((from) => (ring ? [at(from + 1)] : members.filter((to) => to !== from))
    .map((to) => ({ round, from, to, chunk: chunk(round, from, to), parts: parts(round) }))));
  const one = () => 1;
  switch (op) {
    case 'all_gather': return hops(one, (round, from) => at(from - round));
    case 'reduce_scatter': return hops((round) => round + 1, (round, from, to) => (ring ? at(from - 1 - round) : to));
    case 'all_reduce': return [...hopsOf('reduce_scatter', algorithm, n), ...hopsOf('all_gather', algorithm, n).map((hop) => ({ ...hop, round: hop.round + rounds.length }))];
    case 'broadcast': return ring ? rounds.map((round) => ({ round, from: at(root + round), to: at(root + round + 1), chunk: root, parts: 1 }))
      : members.filter((to) => to !== root).map((to) => ({ round: 0, from: root, to, chunk: root, parts: 1 }));
    case 'reduce': return ring ? rounds.map((round) => ({ round, from: at(root + 1 + round), to: at(root + 2 + round), chunk: root, parts: round + 1 }))
      : members.filter((from) => from !== root).map((from) => ({ round: 0, from, to: root, chunk: root, parts: 1 }));
    default: return [];
  }
}

// The pieces of a collective of model states: its hops, by rank and flat buffer; none where its buffers are not known.
function piecesOf(run, call) {
  const state = ['all_gather', 'broadcast'].includes(call.op) ? 'param' : 'grad';
  if (call.purpose !== 'states') return [];
  const { group } = call;
  return flatsOf(run, call).flatMap((flat) => {
    const cut = run.data.flats[flat].states;
    const how = [cut[state], ...Object.values(cut)].find((one) => one && !one.whole && one.parts.length === group.length) || cut[state];
    if (!how || (!how.whole && how.parts.length !== group.length)) return [];
    const owner = run.data.groups[how.axes.join('+')].find((one) => one.includes(group[0])) || group;
    if (group.some((rank) => !owner.includes(rank))) return [];
    const idle = group.findIndex((rank) => call.joined.has(rank) && !(call.op === 'broadcast' ? call.joined.get(rank).received : call.joined.get(rank).sent));
    return hopsOf(call.op, call.algorithm, group.length, Math.max(0, idle))
      .map((hop) => ({ ...hop, flat, state, from: group[hop.from], to: group[hop.to] }));
  });
}

// The flat buffers of a call: its unit's; without a unit, the one or all of its pipeline stage that its payload fits.
function flatsOf(run, call) {
  if (call.unit) return run.data.units[call.unit] || [];
  const [[rank, { payload, dtype }]] = call.joined;
  const itemsize = Number((/\d+/.exec(dtype) || [8])[0]) / 8;
  const size = (flat) => itemsize * Math.max(...Object.values(run.data.flats[flat].states).flatMap((how) => how.parts.map(([, stop]) => stop)));
  const flats = run.data.stages[run.info.get(rank).stage];
  const alike = run.calls.filter((one) => one.op === call.op && one.axis === call.axis && one.phase === call.phase && one.step === call.step && !one.unit
    && one.purpose === 'states' && one.group[0] === call.group[0] && one.joined.has(rank) && one.joined.get(rank).payload === payload);
  const fit = flats.filter((flat) => size(flat) === payload);
  if (fit.length) return fit.length === alike.length ? [fit[alike.indexOf(call)]] : [];
  return sumOf(flats.map(size)) === payload ? flats : [];
}
