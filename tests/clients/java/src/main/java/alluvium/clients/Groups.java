package alluvium.clients;

import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

/** A group of three members, each a process: it rebalances when one joins, leaves or is killed. */
final class Groups {
    private static final int PARTITIONS = 6;
    private static final int RECORDS = 600;

    static void register(Tap tap) {
        tap.test("three members of a group share, hand over and take over", () ->
            joinLeaveKill("java-range", RangeAssignor.class.getName(), false));
        tap.test("three cooperative members of a group share, hand over and take over", () ->
            joinLeaveKill("java-cooperative", CooperativeStickyAssignor.class.getName(), true));
        tap.test("three members with server-side assignment share, hand over and take over", () ->
            joinLeaveKill("java-assigned", Member.BY_THE_SERVER, true));
    }

    private static void joinLeaveKill(String name, String assignor, boolean cooperative) throws Exception {
        Suite.createTopic(name, PARTITIONS);
        List<Process> processes = new ArrayList<>();
        try (Writer writer = new Writer(name)) {
            MemberProcess first = new MemberProcess(processes, name, assignor);
            writer.write();
            settle(List.of(first), writer);
            equal(first.owned(), Set.of(0, 1, 2, 3, 4, 5), "the only member owns all partitions");

            MemberProcess second = new MemberProcess(processes, name, assignor);
            MemberProcess third = new MemberProcess(processes, name, assignor);
            eventually("two partitions each", () -> List.of(first, second, third).stream()
                .allMatch(member -> member.owned().size() == 2));
            writer.write();
            settle(List.of(first, second, third), writer);
            if (cooperative) {
                check(first.revocations() <= 4, "a cooperative member revokes only what it must: it revoked "
                    + first.revocations() + " partitions");
            }

            second.leave();
            eventually("three partitions each after one has left", () -> List.of(first, third).stream()
                .allMatch(member -> member.owned().size() == 3));
            writer.write();
            settle(List.of(first, second, third), writer);
            exactlyOnce(List.of(first, second, third), writer.written);

            third.kill();
            // The killed member does not leave the group: its session must time out.
            eventually("all partitions after one was killed", () -> first.owned().size() == PARTITIONS);
            writer.write();
            int before = writer.written - RECORDS;
            eventually("the last member reads all new records", () ->
                first.values().stream().filter(value -> value >= before).distinct().count() == RECORDS);
            equal(first.values().stream().filter(value -> value >= before).count(), (long) RECORDS,
                "deliveries of the records written after the kill");
            first.leave();
        } finally {
            processes.forEach(Process::destroyForcibly);
        }
    }

    /** Waits until every written record is read, and checks that every partition has exactly one owner. */
    private static void settle(List<MemberProcess> members, Writer writer) throws Exception {
        eventually("all " + writer.written + " records", () ->
            members.stream().flatMap(member -> member.values().stream()).distinct().count() == writer.written);
        List<Integer> owned = new ArrayList<>();
        members.forEach(member -> owned.addAll(member.owned()));
        owned.sort(null);
        equal(owned, List.of(0, 1, 2, 3, 4, 5), "owners of the partitions");
        exactlyOnce(members, writer.written);
    }

    private static void exactlyOnce(List<MemberProcess> members, int written) {
        Map<Integer, Integer> deliveries = new TreeMap<>();
        members.forEach(member -> member.values().forEach(value -> deliveries.merge(value, 1, Integer::sum)));
        equal(deliveries.size(), written, "different records read");
        deliveries.forEach((value, times) -> equal(times, 1, "deliveries of record " + value));
    }

    /** Numbers all records of a topic, round-robin over the partitions. */
    private static final class Writer implements AutoCloseable {
        private final String topic;
        private final KafkaProducer<String, String> producer = Suite.producer(Map.of());
        private int written;

        Writer(String topic) {
            this.topic = topic;
        }

        void write() throws Exception {
            List<java.util.concurrent.Future<?>> answers = new ArrayList<>();
            for (int n = 0; n < RECORDS; n++, written++) {
                answers.add(producer.send(new ProducerRecord<>(topic, n % PARTITIONS, null, String.valueOf(written))));
            }
            for (java.util.concurrent.Future<?> answer : answers) {
                answer.get(Tap.PATIENCE.toSeconds(), TimeUnit.SECONDS);
            }
        }

        @Override
        public void close() {
            producer.close();
        }
    }

    /** A {@link Member} in its own process, and its output so far. */
    private static final class MemberProcess {
        private final Process process;
        private final Thread reader;
        private final Set<Integer> owned = new TreeSet<>();
        private final List<Integer> values = new ArrayList<>();
        private int revocations;

        MemberProcess(List<Process> all, String topicAndGroup, String assignor) throws IOException {
            process = Suite.java(Member.class.getName(), Suite.BOOTSTRAP, topicAndGroup, topicAndGroup, assignor)
                .redirectError(ProcessBuilder.Redirect.INHERIT).start();
            all.add(process);
            reader = new Thread(this::listen);
            reader.setDaemon(true);
            reader.start();
        }

        private void listen() {
            try (BufferedReader lines =
                     new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8))) {
                for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                    take(line.split(" "));
                }
            } catch (IOException killed) {
                // The output of a killed process ends with this exception.
            }
        }

        private synchronized void take(String[] words) {
            List<Integer> numbers = new ArrayList<>();
            for (int n = 1; n < words.length; n++) {
                numbers.add(Integer.valueOf(words[n]));
            }
            switch (words[0]) {
                case "assigned" -> owned.addAll(numbers);
                case "revoked", "lost" -> {
                    numbers.forEach(owned::remove);
                    revocations += numbers.size();
                }
                case "read" -> values.add(numbers.get(2));
                case "left" -> owned.clear();
                default -> throw new AssertionError("unknown line: " + String.join(" ", words));
            }
        }

        synchronized Set<Integer> owned() {
            return new TreeSet<>(owned);
        }

        synchronized List<Integer> values() {
            return new ArrayList<>(values);
        }

        synchronized int revocations() {
            return revocations;
        }

        void leave() throws Exception {
            process.getOutputStream().close();
            check(process.waitFor(Tap.PATIENCE.toSeconds(), TimeUnit.SECONDS), "the member leaves");
            equal(process.exitValue(), 0, "exit status of the member");
            reader.join(Tap.PATIENCE.toMillis());
        }

        void kill() throws Exception {
            process.destroyForcibly().waitFor();
            reader.join(Tap.PATIENCE.toMillis());
        }
    }

    private Groups() {
    }
}
