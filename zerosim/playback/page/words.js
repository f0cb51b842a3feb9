// What happens at a moment, in one plain sentence.

const PHASES = { init: 'initialization', forward: 'forward', backward: 'backward', optimizer: 'optimizer step' };
const phaseWord = (phase) => PHASES[phase] || phase.replaceAll('_', ' ');

function whereText(run, event) {
  const { step, phase, unit, slot } = run.scope(event);
  if (step < 0) return [PHASES.init, unit].filter(Boolean).join(' · ');
  const where = phase === 'init' ? 'between phases' : phaseWord(phase);
  return [where, unit, slot ? `microbatch ${slot}` : ''].filter(Boolean).join(' · ');
}

const callName = (call) => `${verb(call.op)} #${call.sequence}`;
const ofUnit = (unit) => (unit ? ` of ${unit}` : '');
const whereLies = ({ memory }) => (memory === DEVICE ? '' : ` ${MEMORIES[memory]}`);
const nameOf = (call) => callName(call) + ofUnit(call.unit);

function sentence(run, k, wide) {
  if (k === 0) return 'Nothing is allocated yet.';
  const ended = run.endedAt.get(k);
  const flying = run.inFlightAt.get(k);
  if (wide && flying) return inFlightSentence(run, flying);
  if (wide && ended) return endedSentence(run, ended);
  const event = run.events[k - 1];
  if (wide && run.freedAt.has(k)) return run.freedAt.get(k);
  if (wide && k === run.length && event[0] !== MARK) return 'The record ends here.';
  if (wide && event[0] === MARK) return markSentence(run, event, run.overAt.get(`mark ${event[3]}`) === k);
  if (wide && run.keys.includes(k) && run.scope(event).unit) return `${capital(phaseWord(run.scope(event).phase))}${ofUnit(run.scope(event).unit)} has ended.`;
  return eventSentence(run, k, event);
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

function inFlightSentence(run, calls) {
  const [call] = calls;
  const each = calls.flatMap((one) => [...one.joined.values()]);
  const [first] = each;
  if (call.op === 'send') {
    const ends = calls.map(({ group }) => `rank ${group[0]} to rank ${group[1]}`);
    return `A message of ${exact(first.payload)} goes from ${listed(ends)}${call.unit ? `, ${phaseWord(call.phase)} of ${call.unit}` : ''}.`;
  }
  const same = each.every(({ sent, received }) => sent === first.sent && received === first.received);
  const moved = same ? `: each rank sends ${exact(first.sent)}${first.received === null ? '' : ` and receives ${exact(first.received)}`}` : '';
  const who = calls.length > 1 ? `${calls.length} groups along ${run.axis(call.axis)} join` : each.length > 1 ? `All ${each.length} ranks${run.ranks.length > each.length ? ` of a group along ${run.axis(call.axis)}` : ''} join` : `Rank ${[...call.joined.keys()][0]} joins`;
  return `${who} ${nameOf(call)}${moved}.`;
}

const RESULTS = {
  all_gather: 'every rank now has the whole', reduce_scatter: 'each rank keeps the SUM of its own shard',
  all_reduce: 'every rank has the SUM', broadcast: 'every rank has the owner’s copy', reduce: 'the owner has the SUM',
  all_to_all: 'each rank has its part of every other rank’s', send: 'the message has arrived',
};
// Gradients are averaged over the ranks that share the data; whatever else is added up is a sum.
const isAverage = ({ purpose, axis }) => purpose === 'states' && ['dp', 'edp', 'cp'].some((one) => axis.startsWith(one));
const resultOf = (call) => (RESULTS[call.op] || 'every rank goes on').replace('SUM', isAverage(call) ? 'average' : 'sum');
function endedSentence(run, [call]) {
  return `${capital(callName(call))}${ofUnit(call.unit)} has ended: ${resultOf(call)}.`;
}

const MARKS = { after_init: PHASES.init, end_of_forward: 'forward', end_of_backward: 'backward',
  gradients_upcast: 'casting gradients up', after_step: 'the step', after_save: 'saving' };
function markSentence(run, event, all) {
  const name = run.word(event[3]);
  return `${all ? 'On every rank' : `On rank ${event[1]}`} ${MARKS[name] || name} has ended.`;
}

function eventSentence(run, k, event) {
  const [code, rank, , ...values] = event;
  const key = `${rank}/${values[0]}`;
  const buffer = run.byId.get(key);
  const who = `Rank ${rank}`;
  const what = (one, kind) => `${exact(one.nbytes)} of ${kindWord(kind)}${ofUnit(one.unit)}${whereLies(one)}`;
  switch (code) {
    case ALLOC: case HOST_ALLOC: return `${who} allocates ${what(buffer, buffer.kinds[0][1])}.`;
    case FREE: case HOST_FREE: return `${who} frees ${run.freed.get(k - 1) || what(buffer, run.kindAt(buffer, k))}.`;
    case RETAG: return `${who} keeps ${exact(buffer.nbytes)} as ${kindWord(run.word(values[1]))}${ofUnit(buffer.unit)}.`;
    case KERNEL: return `${who} computes ${run.word(values[0])}${values[1] ? `: ${count(values[1], 'flop')}` : ''}.`;
    case LAUNCH: {
      const call = run.works.get(key);
      if (call.op === 'send' && rank === call.group[1]) {
        return `${who} posts a receive from rank ${call.group[0]}. ${call.joined.get(call.group[0])?.at < k ? 'The message is on its way.' : 'Nothing travels before the sender sends.'}`;
      }
      const { sent, received } = call.joined.get(rank);
      const missing = call.op === 'send' ? [] : run.missingFrom(call, k);
      const waits = missing.length ? ` It waits for ${ranksText(missing)}.` : '';
      return `${who} joins ${nameOf(call)}: it sends ${run.load(call, sent, exact)}${received === null ? '' : ` and receives ${run.load(call, received, exact)}`}.${waits}`;
    }
    case WAIT: return `${who} has the result of ${run.works.has(key) ? callName(run.works.get(key)) : run.copying.has(key) ? `a copy of ${exact(run.copying.get(key).nbytes)}` : 'its CPU'} and goes on.`;
    case MESSAGE: {
      const [, peer, nbytes, times] = values;
      const load = run.load(run.works.get(key), nbytes, exact);
      if (peer < 0) return `${who} sends ${load} to ${times === 1 ? 'the other rank' : `each of the ${times} other ranks`}.`;
      return `${who} sends ${load} to rank ${peer}${times > 1 ? `, ${times} times` : ''}.`;
    }
    case MARK: return markSentence(run, event, false);
    default: return `${who} ${values[4] === null ? 'copies' : 'starts to copy'} ${exact(values[2])} from ${run.word(values[0])} to ${run.word(values[1])}.`;
  }
}

const bufferName = (buffer, kind) => [buffer.home?.startsWith(buffer.unit) ? buffer.home : buffer.unit, buffer.name || kindWord(kind)].filter(Boolean).join(' · ') + whereLies(buffer);
