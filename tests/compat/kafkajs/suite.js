// KafkaJS as an application uses it: BOOTSTRAP=host:port node suite.js [TEST...]. Reports in TAP (testanything.org).
'use strict'

const { randomUUID } = require('crypto')
const { isDeepStrictEqual } = require('util')
const {
  AclOperationTypes, AclPermissionTypes, AclResourceTypes, CompressionCodecs, CompressionTypes,
  ConfigResourceTypes, Kafka, Partitioners, ResourcePatternTypes, logLevel,
} = require('kafkajs')

CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')
const lz4 = require('lz4js')
const xxh32 = require('lz4js/xxh32')
const LZ4_BLOCK_BYTES = 4 << 20
// lz4js marks the blocks of a frame as dependent on each other, which Kafka refuses to read. A single
// block depends on no other, so its frame may be marked as independent.
function lz4Frame(buffer) {
  check(buffer.length <= LZ4_BLOCK_BYTES, `${buffer.length} bytes do not fit a block of LZ4`)
  const frame = Buffer.from(lz4.compress(buffer))
  frame[4] |= 0x20
  frame[6] = xxh32.hash(0, frame, 4, 2) >> 8
  return frame
}
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async encoder => lz4Frame(encoder.buffer),
  decompress: async buffer => Buffer.from(lz4.decompress(buffer)),
})
// KafkaJS has no zstd. Node has one since 22.15.
const zlib = require('zlib')
if (zlib.zstdCompressSync) {
  CompressionCodecs[CompressionTypes.ZSTD] = () => ({
    compress: async encoder => zlib.zstdCompressSync(encoder.buffer),
    decompress: async buffer => zlib.zstdDecompressSync(buffer),
  })
}

// Limit after which a test fails instead of hanging. No test measures time.
const PATIENCE = 60_000
const PARTITIONS = 3

const brokers = [process.env.BOOTSTRAP || '127.0.0.1:9092']
const kafka = new Kafka({ brokers, clientId: 'alluvium-kafkajs', logLevel: logLevel.NOTHING })
const tests = {}

class Skipped extends Error {}

const unique = kind => `${kind}-${randomUUID().slice(0, 8)}`
const sleep = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds))

function equal(got, wanted, what) {
  if (!isDeepStrictEqual(got, wanted)) {
    throw new Error(`${what}: ${JSON.stringify(got)}, not ${JSON.stringify(wanted)}`)
  }
}

function check(condition, what) {
  if (!condition) throw new Error(what)
}

async function until(what, condition) {
  const deadline = Date.now() + PATIENCE
  while (!(await condition())) {
    check(Date.now() < deadline, `${what}: not within ${PATIENCE} ms`)
    await sleep(20)
  }
}

async function connected(client, use) {
  await client.connect()
  try {
    return await use(client)
  } finally {
    await client.disconnect()
  }
}

const asAdmin = use => connected(kafka.admin(), use)
const asProducer = (settings, use) =>
  connected(kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner, ...settings }), use)

async function newTopic(numPartitions = 1) {
  const topic = unique('js')
  await asAdmin(admin => admin.createTopics({ topics: [{ topic, numPartitions }], waitForLeaders: true }))
  return topic
}

// The first records of a topic, read by a group.
async function read(topic, count, settings = {}) {
  const got = []
  await connected(kafka.consumer({ groupId: unique('reader'), ...settings }), async consumer => {
    await consumer.subscribe({ topic, fromBeginning: true })
    await consumer.run({ eachMessage: async ({ message }) => { got.push(message) } })
    await until(`${count} records`, () => got.length >= count)
  })
  return got
}

async function roundTrip(compression, settings = {}) {
  const topic = await newTopic()
  const messages = Array.from({ length: 500 }, (_, n) => ({
    key: n % 3 ? `key-${n}` : null,
    value: `value-${n} `.repeat(40),
    headers: { n: `${n}` },
  }))
  await asProducer(settings, async producer => {
    for (let from = 0; from < messages.length; from += 100) {
      const batch = messages.slice(from, from + 100)
      const [appended] = await producer.send({ topic, compression, acks: -1, messages: batch })
      equal(appended.baseOffset, `${from}`, 'the offset')
    }
  })
  const got = (await read(topic, messages.length)).map(({ key, value, headers }) => ({
    key: key && key.toString(), value: value.toString(), headers: { n: headers.n.toString() },
  }))
  got.forEach((record, n) => equal(record, messages[n], `record ${n}`))
}

tests.records_without_compression = () => roundTrip(CompressionTypes.None)
tests.records_with_gzip = () => roundTrip(CompressionTypes.GZIP)
tests.records_with_snappy = () => roundTrip(CompressionTypes.Snappy)
tests.records_with_lz4 = () => roundTrip(CompressionTypes.LZ4)
tests.records_with_zstd = () => {
  if (!zlib.zstdCompressSync) throw new Skipped('Node has zstd since 22.15, and KafkaJS has none')
  return roundTrip(CompressionTypes.ZSTD)
}
tests.records_of_an_idempotent_producer = () =>
  roundTrip(CompressionTypes.GZIP, { idempotent: true, maxInFlightRequests: 1 })

tests.committed_records_are_read_and_aborted_ones_are_not = async () => {
  const topic = await newTopic()
  const settings = { transactionalId: unique('tx'), idempotent: true, maxInFlightRequests: 1 }
  await asProducer(settings, async producer => {
    for (let number = 0; number < 10; number++) {
      const transaction = await producer.transaction()
      for (let part = 0; part < 5; part++) {
        await transaction.send({ topic, messages: [{ value: `${number}/${part}` }] })
      }
      await (number % 2 ? transaction.abort() : transaction.commit())
    }
  })
  const committed = []
  for (let number = 0; number < 10; number += 2) {
    for (let part = 0; part < 5; part++) committed.push(`${number}/${part}`)
  }
  const values = (await read(topic, 25)).map(record => record.value.toString())
  equal(values, committed, 'records with read_committed')
  equal((await read(topic, 50, { readUncommitted: true })).length, 50, 'records with read_uncommitted')
}

tests.offsets_are_committed_with_the_transaction = async () => {
  const [source, target, consumerGroupId] = [await newTopic(), await newTopic(), unique('group')]
  const settings = { transactionalId: unique('tx'), idempotent: true, maxInFlightRequests: 1 }
  await asProducer(settings, async producer => {
    for (const [offset, commits] of [['5', true], ['9', false], ['7', true]]) {
      const transaction = await producer.transaction()
      await transaction.send({ topic: target, messages: [{ value: offset }] })
      const topics = [{ topic: source, partitions: [{ partition: 0, offset }] }]
      await transaction.sendOffsets({ consumerGroupId, topics })
      await (commits ? transaction.commit() : transaction.abort())
    }
  })
  await asAdmin(async admin => {
    const [committed] = await admin.fetchOffsets({ groupId: consumerGroupId, topics: [source] })
    equal(committed.partitions[0].offset, '7', 'the offset')
  })
  const values = (await read(target, 2)).map(record => record.value.toString())
  equal(values, ['5', '7'], 'records with read_committed')
}

tests.a_second_producer_of_the_same_name_ends_the_first = async () => {
  const topic = await newTopic()
  const settings = {
    transactionalId: unique('tx'), idempotent: true, maxInFlightRequests: 1, retry: { retries: 1 },
  }
  await asProducer(settings, async first => {
    const lost = await first.transaction()
    await lost.send({ topic, messages: [{ value: 'lost' }] })
    await asProducer(settings, async second => {
      const kept = await second.transaction()
      await kept.send({ topic, messages: [{ value: 'kept' }] })
      await kept.commit()
    })
    const failure = await lost.commit().then(() => 'nothing', error => error.type)
    check(['INVALID_PRODUCER_EPOCH', 'PRODUCER_FENCED'].includes(failure), `the first producer got ${failure}`)
  })
  equal((await read(topic, 1)).map(record => record.value.toString()), ['kept'], 'what is read')
}

tests.a_group_gives_partitions_to_a_second_member_and_back = async () => {
  const [topic, groupId] = [await newTopic(PARTITIONS), unique('group')]
  const member = async () => {
    const consumer = kafka.consumer({ groupId, heartbeatInterval: 300, rebalanceTimeout: 10_000 })
    const one = { consumer, partitions: [] }
    consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => {
      one.partitions = payload.memberAssignment[topic] || []
    })
    await consumer.connect()
    await consumer.subscribe({ topic })
    await consumer.run({ eachMessage: async () => {} })
    return one
  }
  const sorted = members => members.flatMap(one => one.partitions).sort()
  const all = [0, 1, 2]
  const first = await member()
  await until('the first member has all', () => isDeepStrictEqual(sorted([first]), all))
  const second = await member()
  await until('both have some', () => first.partitions.length && second.partitions.length
    && isDeepStrictEqual(sorted([first, second]), all))
  await second.consumer.disconnect()
  await until('the first member has all again', () => isDeepStrictEqual(sorted([first]), all))
  await first.consumer.disconnect()
}

tests.a_group_goes_on_where_it_has_committed = async () => {
  const [topic, groupId] = [await newTopic(), unique('group')]
  await asProducer({}, producer => producer.send({
    topic, messages: Array.from({ length: 20 }, (_, n) => ({ value: `${n}` })),
  }))
  await read(topic, 20, { groupId })
  await asAdmin(async admin => {
    await admin.setOffsets({ groupId, topic, partitions: [{ partition: 0, offset: '7' }] })
  })
  equal((await read(topic, 13, { groupId }))[0].offset, '7', 'the first record after the commit')
}

tests.batches_pauses_and_seeks = async () => {
  const topic = await newTopic()
  await asProducer({}, producer => producer.sendBatch({
    topicMessages: [{ topic, messages: Array.from({ length: 50 }, (_, n) => ({ value: `${n}` })) }],
  }))
  const got = []
  await connected(kafka.consumer({ groupId: unique('group') }), async consumer => {
    await consumer.subscribe({ topic, fromBeginning: true })
    await consumer.run({
      eachBatchAutoResolve: false,
      eachBatch: async ({ batch, resolveOffset, heartbeat }) => {
        for (const message of batch.messages) {
          got.push(message.offset)
          resolveOffset(message.offset)
          await heartbeat()
        }
      },
    })
    await until('all are read', () => got.length === 50)
    consumer.pause([{ topic }])
    consumer.seek({ topic, partition: 0, offset: '40' })
    consumer.resume([{ topic }])
    await until('records after the seek are read again', () => got.length === 60)
  })
  equal(got[50], '40', 'the first record after the seek')
}

tests.offsets_are_found_by_time = async () => {
  const topic = await newTopic()
  const base = Date.now() - 100_000
  await asProducer({}, producer => producer.send({
    topic,
    compression: CompressionTypes.GZIP,
    messages: Array.from({ length: 100 }, (_, n) => ({ value: 'x', timestamp: `${base + n * 1000}` })),
  }))
  await asAdmin(async admin => {
    const at = await admin.fetchTopicOffsetsByTimestamp(topic, base + 41_500)
    equal(at, [{ partition: 0, offset: '42' }], 'the first record after a time')
    const [ends] = await admin.fetchTopicOffsets(topic)
    equal([ends.low, ends.high], ['0', '100'], 'the beginning and the end')
  })
}

tests.topics_and_their_settings_are_changed = () => asAdmin(async admin => {
  const topic = unique('js')
  const configEntries = [{ name: 'cleanup.policy', value: 'compact' }]
  equal(await admin.createTopics({ topics: [{ topic, configEntries }] }), true, 'it is created')
  equal(await admin.createTopics({ topics: [{ topic }] }), false, 'it is created again')
  await admin.createPartitions({ topicPartitions: [{ topic, count: 4 }] })
  const { topics } = await admin.fetchTopicMetadata({ topics: [topic] })
  equal(topics[0].partitions.length, 4, 'partitions')
  const resource = { type: ConfigResourceTypes.TOPIC, name: topic }
  await admin.alterConfigs({
    resources: [{ ...resource, configEntries: [{ name: 'retention.ms', value: '7200000' }] }],
  })
  await until('the setting is the new one', async () => {
    const { resources } = await admin.describeConfigs({
      resources: [{ ...resource, configNames: ['retention.ms', 'cleanup.policy'] }],
    })
    const values = Object.fromEntries(
      resources[0].configEntries.map(({ configName, configValue }) => [configName, configValue]))
    return values['retention.ms'] === '7200000' && values['cleanup.policy'] === 'delete'
  })
  await admin.deleteTopics({ topics: [topic] })
  await until('it is gone', async () => !(await admin.listTopics()).includes(topic))
})

tests.records_are_deleted = async () => {
  const topic = await newTopic()
  await asProducer({}, producer => producer.send({
    topic, messages: Array.from({ length: 20 }, (_, n) => ({ value: `${n}` })),
  }))
  await asAdmin(async admin => {
    // It reads the leader from metadata that only other calls load.
    equal((await admin.fetchTopicOffsets(topic))[0].low, '0', 'the beginning')
    await admin.deleteTopicRecords({ topic, partitions: [{ partition: 0, offset: '7' }] })
    await until('they are gone', async () => (await admin.fetchTopicOffsets(topic))[0].low === '7')
  })
  equal((await read(topic, 13))[0].offset, '7', 'the first remaining record')
}

tests.groups_are_listed_described_and_deleted = async () => {
  const [topic, groupId] = [await newTopic(), unique('group')]
  await asAdmin(async admin => {
    await connected(kafka.consumer({ groupId }), async consumer => {
      await consumer.subscribe({ topic })
      await consumer.run({ eachMessage: async () => {} })
      await until('it is stable', async () => {
        const { groups } = await admin.describeGroups([groupId])
        return groups[0].state === 'Stable' && groups[0].members.length === 1
      })
      const { groups } = await admin.listGroups()
      check(groups.some(group => group.groupId === groupId), 'it is not listed')
    })
    await until('it is empty', async () =>
      (await admin.describeGroups([groupId])).groups[0].state !== 'Stable')
    equal(await admin.deleteGroups([groupId]), [{ groupId, errorCode: 0 }], 'deletion')
  })
}

tests.acls_are_created_described_and_deleted = () => asAdmin(async admin => {
  const acl = {
    resourceType: AclResourceTypes.TOPIC,
    resourceName: unique('acl'),
    resourcePatternType: ResourcePatternTypes.LITERAL,
    principal: 'User:carol',
    host: '*',
    operation: AclOperationTypes.READ,
    permissionType: AclPermissionTypes.ALLOW,
  }
  equal(await admin.createAcls({ acl: [acl] }), true, 'it is created')
  await until('it is found', async () => (await admin.describeAcls(acl)).resources.length === 1)
  const { filterResponses } = await admin.deleteAcls({ filters: [acl] })
  equal(filterResponses[0].matchingAcls.map(each => each.principal), ['User:carol'], 'what is deleted')
})

async function main(names) {
  const chosen = Object.entries(tests).filter(([name]) => !names.length || names.includes(name))
  console.log(`1..${chosen.length}`)
  let failed = 0
  for (const [index, [name, run]] of chosen.entries()) {
    const title = `${index + 1} - ${name}`
    try {
      await run()
      console.log(`ok ${title}`)
    } catch (error) {
      if (error instanceof Skipped) {
        console.log(`ok ${title} # SKIP ${error.message}`)
        continue
      }
      failed++
      console.log(String(error.stack).replace(/^/gm, '# '))
      console.log(`not ok ${title}: ${String(error.message).replace(/\s+/g, ' ')}`)
    }
  }
  // A member that a failed test left must not keep the program running.
  process.exit(failed || !chosen.length ? 1 : 0)
}

main(process.argv.slice(2))
