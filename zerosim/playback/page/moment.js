// A run, and what is true of it at moment k, when k of its events have happened: live buffers, collectives, bytes sent.
// Everything is asked of births and deaths, so that a moment looks the same whichever way it was come to.

class Run {
  constructor(data) {
    Object.assign(this, { data, events: data.events, length: data.events.length });
    this.ranks = data.ranks.map((rank) => rank.rank);
    this.info = new Map(data.ranks.map((rank) => [rank.rank, rank]));
    this.buffers = [];
    this.byId = new Map();
    this.rowCache = new Map();
    this.visited = new Set(); // rank/unit
    this.calls = data.calls.map(([op, axis, purpose, group, sequence, algorithm], index) => (
      { index, op, axis, purpose, group, sequence, algorithm, joined: new Map(), ended: new Map() }));
    this.works = new Map();
    this.sent = new Map(this.ranks.map((rank) => [rank, []]));
    this.copies = new Map(this.ranks.map((rank) => [rank, []]));
    this.copying = new Map();
    this.own = new Map(this.ranks.map((rank) => [rank, []])); // the numbers of a rank's events
    this.events.forEach((event, at) => this.read(event, at));
    this.most = Math.max(1, ...data.ranks.map((rank) => rank.peak));
    const others = data.ranks.map((rank) => rank.others); // by memory beside the device: what the ledger has
    this.memories = new Map(Object.keys(MEMORIES).filter((name) => others.some((each) => each[name]))
      .map((name) => [name, Math.max(1, ...others.map((each) => (each[name] ? each[name].peak : 0)))]));
    this.mostPassing = data.most_passing;
    this.ofRank = new Map(this.ranks.map((rank) => [rank, this.findStretches(rank)]));
    this.stretches = this.ofRank.get(this.ranks[0]);
    this.findArrivals();
    this.overAt = new Map();
    this.keys = this.keyMoments();
    this.start = this.keys.find((k) => k > 0) || 0;
  }

  // So many bytes of a collective in words: as rows, if tokens are on their way to experts or back.
  load(call, nbytes, words) {
    const width = call && this.data.row_of[call.index];
    return width ? count(nbytes / width, 'row') : words(nbytes);
  }

  // The name of an axis: dp, where no replicas share the data too.
  axis(name) { return this.data.mesh.dp_replicate ? name : name.replace('dp_shard', 'dp'); }

  word(at) { return this.data.words[at]; }
  scope(event) {
    const [step, phase, unit, slot] = this.data.scopes[event[2]];
    return { step, phase, unit, slot };
  }

  read(event, at) {
    const [code, rank, , ...values] = event;
    const key = `${rank}/${values[0]}`;
    this.own.get(rank).push(at);
    this.visited.add(`${rank}/${this.scope(event).unit}`);
    if (code === ALLOC || code === HOST_ALLOC) {
      const [id, nbytes, kind, , name, memory] = values;
      const buffer = { id, rank, nbytes, born: at, died: Infinity, unit: this.scope(event).unit,
        kinds: [[at, this.word(kind)]], name: this.word(name), flat: this.data.flat_of[key], home: (this.data.flats[this.data.flat_of[key]] || {}).name, memory: this.word(memory) || DEVICE };
      this.buffers.push(buffer);
      this.byId.set(key, buffer);
    } else if (code === FREE || code === HOST_FREE) {
      this.byId.get(key).died = at;
    } else if (code === RETAG) {
      this.byId.get(key).kinds.push([at, this.word(values[1])]);
    } else if (code === LAUNCH) {
      const [work, index, dtype, payload, sent, received, modelled] = values;
      const call = this.calls[index];
      this.works.set(`${rank}/${work}`, call);
      const { step, phase, unit } = this.scope(event);
      const receives = call.op === 'send' && rank === call.group[1];
      call.joined.set(rank, { at, payload, sent: sent === null ? modelled || 0 : sent, received, dtype: this.word(dtype) });
      if (!receives || !call.last) Object.assign(call, { unit: unit || call.unit || '', phase, step, last: at });
      if (call.purpose === 'states' && step >= 0) this.sent.get(rank).push([at, step, sent === null ? modelled || 0 : sent]);
    } else if (code === COPY) {
      const [source, target, nbytes, , work] = values;
      const copy = { source: this.word(source), target: this.word(target), nbytes, at, end: work === null ? at + 1 : Infinity };
      this.copies.get(rank).push(copy);
      this.copying.set(`${rank}/${work}`, copy); // until it is waited for
    } else if (code === WAIT && this.copying.has(key)) {
      const copy = this.copying.get(key);
      copy.end = Math.min(copy.end, at);
    } else if (code === WAIT && this.works.has(key)) {
      this.works.get(key).ended.set(rank, at);
    } else if (code === MESSAGE && this.works.has(key)) {
      const call = this.works.get(key);
      if (!call.ended.size) call.last = at;
    }
  }

  // The moments that "collectives" stops at: one in flight on all its ranks, ended on all; a unit's end; marks.
  keyMoments() {
    const keys = new Set([0, this.length]);
    this.inFlightAt = new Map();
    this.endedAt = new Map();
    this.arrives = new Map(); // when a call has ended on all its ranks
    // The same collective in other groups of its axis is in flight at the same time.
    const alike = new Map();
    for (const call of this.calls) {
      const name = [call.op, call.axis, call.sequence, call.unit, call.phase, call.group[0] < call.group.at(-1)].join('/');
      alike.set(name, [...(alike.get(name) || []), call]);
    }
    for (const calls of alike.values()) {
      const flying = Math.max(...calls.map((call) => call.last)) + 1;
      keys.add(flying);
      this.inFlightAt.set(flying, calls);
      if (calls.every((call) => call.ended.size === call.joined.size && call.ended.size)) {
        const last = Math.max(...calls.flatMap((call) => (call.op === 'send' ? call.ended.get(call.group[1]) ?? [...call.ended.values()] : [...call.ended.values()]))) + 1;
        keys.add(last);
        this.endedAt.set(last, calls);
        calls.forEach((call) => this.arrives.set(call, last));
      }
    }
    this.events.forEach((event, at) => { if (event[0] === MARK) this.overAt.set(`mark ${event[3]}`, at + 1); });
    for (const stage of new Set(this.ranks.map((rank) => this.info.get(rank).stage))) {
      const rank = this.ranks.findLast((one) => this.info.get(one).stage === stage); // in the order of turns the last one
      for (const { name, nth, unit, step, end } of this.ofRank.get(rank)) if (unit && step >= 0) this.overAt.set(`${stage}/${name}/${nth}`, end);
    }
    this.freedAt = new Map(); // sentences, where the last rank frees its copy
    this.freed = new Map(); // by event: what is freed
    this.data.frees.forEach(([events, sentence, whats]) => {
      events.forEach((at, index) => this.freed.set(at, whats[index]));
      this.freedAt.set(1 + Math.max(...events), sentence);
      keys.add(1 + Math.max(...events));
    });
    const unimportant = new Set([...this.overAt].filter(([name, at]) => !name.startsWith('mark') && !keys.has(at)).map(([, at]) => at));
    const found = [...new Set([...keys, ...this.overAt.values()])].sort((a, b) => a - b);
    const works = (from, to) => this.events.slice(from, to).some(([code]) => code === KERNEL || code === ALLOC);
    return found.filter((at, index) => !unimportant.has(at) || works(found[index - 1], at));
  }

  // When what a gathered buffer is for has arrived: where its gather has ended.
  findArrivals() {
    const gathers = this.calls.filter((call) => ['all_gather', 'broadcast'].includes(call.op));
    for (const buffer of this.buffers) {
      buffer.filled = buffer.born;
      if (!GATHERED.param.includes(buffer.kinds[0][1])) continue;
      const call = gathers.find(({ unit, joined }) => unit === buffer.unit && joined.has(buffer.rank) && joined.get(buffer.rank).at > buffer.born && joined.get(buffer.rank).at < buffer.died);
      if (call) buffer.filled = call.ended.get(buffer.rank) ?? Infinity;
    }
  }

  kindAt(buffer, k) {
    let found = buffer.kinds[0][1];
    for (const [at, kind] of buffer.kinds) if (at < k) found = kind;
    return found;
  }

  // Live buffers of every rank at k, oldest first.
  live(k) {
    const found = new Map(this.ranks.map((rank) => [rank, []]));
    for (const buffer of this.buffers) {
      if (buffer.born < k && buffer.died >= k) found.get(buffer.rank).push({ ...buffer, kind: this.kindAt(buffer, k), whole: buffer });
    }
    return found;
  }

  // Bytes by kind of a rank's live buffers in one memory.
  byKind(buffers, place = DEVICE) {
    const found = new Map();
    for (const { kind, nbytes, memory } of buffers) if (memory === place) found.set(kind, (found.get(kind) || 0) + nbytes);
    return new Map([...Object.keys(DATA.kinds), ...found.keys()].filter((kind) => found.get(kind)).map((kind) => [kind, found.get(kind)]));
  }

  // Bytes that a rank has sent for model states in the step at hand.
  sentBytes(rank, k) {
    const step = this.own.get(rank).reduce((found, at) => (at < k ? Math.max(found, this.scope(this.events[at]).step) : found), -1);
    return sumOf(this.sent.get(rank).map(([at, one, sent]) => (at < k && one === step ? sent : 0)));
  }

  // Collectives that some rank has joined and some rank has not ended.
  inFlight(k) {
    return this.calls.filter((call) => {
      const joined = this.joinedBy(call, k);
      if (call.op === 'send' && this.info.has(call.group[0]) && !joined.includes(call.group[0])) return false; // a posted receive is no traffic
      const target = call.op === 'send' && this.info.has(call.group[1]) ? [call.group[1]] : joined; // a message is there when its target has it
      return joined.length > 0 && target.some((rank) => !(call.ended.get(rank) < k));
    });
  }

  joinedBy(call, k) { return [...call.joined].filter(([, { at }]) => at < k).map(([rank]) => rank); }
  missingFrom(call, k) { return call.group.filter((rank) => this.info.has(rank) && !(call.joined.has(rank) && call.joined.get(rank).at < k)); }

  // The next collective that nobody has joined.
  nextCall(k) {
    let found = null;
    for (const call of this.calls) {
      const first = Math.min(...[...call.joined.values()].map(({ at }) => at));
      if (first >= k && (!found || first < found.first)) found = { call, first };
    }
    return found;
  }

  nextKey(k) { return this.keys.find((key) => key > k) ?? this.length; }
  lastKey(k) { return this.keys.findLast((key) => key < k) ?? 0; }

  rowOf(unit) { return unit.startsWith('h.') ? unit.split('.').slice(0, 2).join('.') : unit; }

  // A rank's runs of one phase, unit and microbatch: what two stages are laid side by side by.
  findStretches(rank) {
    const found = [];
    const seen = new Map();
    for (const at of this.own.get(rank)) {
      const { step, phase, unit, slot } = this.scope(this.events[at]);
      const name = `${step}/${phase}/${unit}/${slot}`;
      const before = found.at(-1);
      if (before && before.name === name) before.end = at + 1;
      else {
        seen.set(name, (seen.get(name) || 0) + 1);
        found.push({ name, nth: seen.get(name), start: at, end: at + 1, phase, unit, slot, step });
      }
    }
    found.forEach((one, index) => { one.until = found[index + 1] ? found[index + 1].start : this.length; });
    return found;
  }

  // The moment of this run that corresponds to moment k of another one.
  follow(other, k) {
    if (k >= other.length) return this.length;
    if (k <= other.start) return Math.min(k, this.start);
    let index = other.stretches.findLastIndex((one) => one.start < k);
    for (let back = index; back >= 0; back -= 1) {
      const one = other.stretches[back];
      const match = this.stretches.find((mine) => mine.name === one.name && mine.nth === one.nth);
      if (match) {
        const share = back < index ? 1 : clamp((k - one.start) / (one.until - one.start), 0, 1);
        return Math.round(match.start + share * (match.until - match.start));
      }
    }
    return this.start;
  }

  // Whether the bars add up to the ledger at every mark.
  agrees() {
    const last = new Map(this.events.flatMap((event, at) => (event[0] === MARK ? [[`${event[1]}/${event[3]}`, at]] : [])));
    return [...last.values()].every((at) => {
      const event = this.events[at];
      const name = this.word(event[3]);
      const buffers = this.live(at + 1).get(event[1]);
      const { marks, others } = this.info.get(event[1]);
      return Object.entries({ ...others, [DEVICE]: { marks } }).every(([memory, of]) => {
        const counted = this.byKind(buffers, memory);
        const ledger = of.marks[name] || {};
        return counted.size === Object.keys(ledger).length && [...counted].every(([kind, nbytes]) => ledger[kind] === nbytes);
      });
    });
  }
}
