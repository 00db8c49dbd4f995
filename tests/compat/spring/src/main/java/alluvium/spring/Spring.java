package alluvium.spring;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.kafka.config.KafkaListenerEndpointRegistry;
import org.springframework.kafka.core.KafkaAdmin;
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;

/** Runs {@link Application} and checks the results of records that are sent to it. Reports in TAP. {@code BOOTSTRAP=... Spring} */
public final class Spring {
    /** Limit after which a test fails instead of hanging. No test measures time. */
    private static final Duration PATIENCE = Duration.ofSeconds(60);

    private interface Test {
        void run() throws Exception;
    }

    private record Named(String name, Test test) {
    }

    private final AnnotationConfigApplicationContext context;
    private final KafkaTemplate<String, String> template;
    private final KafkaTemplate<String, String> transactional;

    @SuppressWarnings("unchecked")
    private Spring(AnnotationConfigApplicationContext context) {
        this.context = context;
        this.template = context.getBean("template", KafkaTemplate.class);
        this.transactional = context.getBean("transactional", KafkaTemplate.class);
    }

    public static void main(String[] args) {
        int failed = 0;
        try (AnnotationConfigApplicationContext context = new AnnotationConfigApplicationContext(Application.class)) {
            Spring spring = new Spring(context);
            List<Named> tests = List.of(
                new Named("the application creates its topics", spring::topics),
                new Named("a listener in a transaction forwards each record exactly once", spring::once),
                new Named("a record that fails becomes a dead letter after retries", spring::letters),
                new Named("a record that fails goes through retry topics", spring::retries),
                new Named("a listener takes batches", spring::batches),
                new Named("a record that is not acknowledged is delivered again", spring::manual),
                new Named("a transaction is committed and another one rolled back", spring::transactions),
                new Named("a request is answered", spring::requests),
                new Named("a listener that is stopped and started resumes at its offset", spring::restart));
            System.out.println("1.." + tests.size());
            for (int index = 0; index < tests.size(); index++) {
                String name = (index + 1) + " - " + tests.get(index).name();
                try {
                    tests.get(index).test().run();
                    System.out.println("ok " + name);
                } catch (Exception | AssertionError error) {
                    failed++;
                    error.printStackTrace();
                    System.out.println("not ok " + name + ": " + String.valueOf(error.getMessage()).replace('\n', ' '));
                }
            }
        }
        System.exit(failed == 0 ? 0 : 1);
    }

    private void topics() {
        KafkaAdmin admin = context.getBean(KafkaAdmin.class);
        equal(admin.describeTopics("once-in").get("once-in").partitions().size(), 3, "partitions");
    }

    private void once() throws Exception {
        List<String> numbers = numbers(60);
        for (String number : numbers) {
            template.send("once-in", number, number).get();
        }
        List<String> got = read("once-out", 60);
        equal(sorted(got), sorted(numbers), "records with read_committed");
        equal(Application.ROLLBACKS.get(), 20, "rollbacks");
    }

    private void letters() throws Exception {
        template.send("letters", 0, "key", "bad").get();
        template.send("letters", 0, "key", "good").get();
        equal(take("letters", 4), List.of("bad", "bad", "bad", "good"), "records that the listener received");
        equal(take("dead-letters", 1), List.of("bad of letters"), "dead letters");
    }

    private void retries() throws Exception {
        template.send("mail", 0, "key", "bad").get();
        template.send("mail", 0, "key", "good").get();
        List<String> given = take("mail", 4);
        equal(sorted(given), sorted(List.of("bad of mail", "good of mail", "bad of mail-retry", "bad of mail-retry")), "records that it received");
        equal(take("dead-mail", 1), List.of("bad of mail-dlt"), "dead mail");
    }

    private void batches() throws Exception {
        List<String> numbers = numbers(300);
        numbers.forEach(number -> template.send("batches", number, number));
        template.flush();
        equal(sorted(take("batches", 300)), sorted(numbers), "records that the listener received");
    }

    private void manual() throws Exception {
        template.send("manual", 0, "key", "record").get();
        equal(take("manual", 2), List.of("record", "record"), "records that the listener received");
    }

    private void transactions() throws Exception {
        transactional.executeInTransaction(operations -> operations.send("once-out", "committed"));
        try {
            transactional.executeInTransaction(operations -> {
                operations.send("once-out", "taken back").join();
                throw new IllegalStateException("on purpose");
            });
            throw new AssertionError("it did not fail");
        } catch (IllegalStateException wanted) {
            equal(wanted.getMessage(), "on purpose", "the failure");
        }
        transactional.executeInTransaction(operations -> operations.send("once-out", "last"));
        List<String> got = read("once-out", 62);
        equal(got.stream().filter(value -> !Character.isDigit(value.charAt(0))).sorted().toList(), List.of("committed", "last"), "what is read");
    }

    @SuppressWarnings("unchecked")
    private void requests() throws Exception {
        ReplyingKafkaTemplate<String, String, String> replying = context.getBean(ReplyingKafkaTemplate.class);
        if (!replying.waitForAssignment(PATIENCE)) {
            throw new AssertionError("the listener for replies has no partitions");
        }
        String reply = replying.sendAndReceive(new ProducerRecord<>("requests", "a question"), PATIENCE)
            .get(PATIENCE.toSeconds(), TimeUnit.SECONDS).value();
        equal(reply, "A QUESTION", "the reply");
    }

    private void restart() throws Exception {
        var container = context.getBean(KafkaListenerEndpointRegistry.class).getListenerContainer("batches");
        container.stop();
        eventually("it has stopped", () -> !container.isRunning());
        template.send("batches", "later").get();
        container.start();
        equal(take("batches", 1), List.of("later"), "records that the listener received");
    }

    private static List<String> numbers(int count) {
        return IntStream.range(0, count).mapToObj(String::valueOf).toList();
    }

    private static List<String> sorted(Collection<String> values) {
        return values.stream().sorted().toList();
    }

    /** The records that a listener received: this many, and no more for a while. */
    private static List<String> take(String listener, int count) throws Exception {
        var seen = Application.seen(listener);
        eventually(count + " records for " + listener, () -> seen.size() >= count);
        Thread.sleep(300);
        List<String> values = new ArrayList<>();
        if (listener.equals("manual")) {
            values.addAll(seen);
        } else {
            seen.drainTo(values);
        }
        return values;
    }

    /** The committed records of a topic: this many, and no more for a while. */
    private static List<String> read(String topic, int count) throws Exception {
        List<String> values = new ArrayList<>();
        Map<String, Object> settings = Application.consumer();
        settings.put("group.id", topic + "-" + System.nanoTime());
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(List.of(topic));
            Callable<Boolean> more = () -> {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> values.add(record.value()));
                return values.size() >= count;
            };
            eventually(count + " records of " + topic, more);
            for (int again = 0; again < 5; again++) {
                more.call();
            }
        }
        return values;
    }

    private static void equal(Object got, Object wanted, String what) {
        if (!got.equals(wanted)) {
            throw new AssertionError(what + ": " + got + ", not " + wanted);
        }
    }

    private static void eventually(String what, Callable<Boolean> attempt) throws Exception {
        long deadline = System.nanoTime() + PATIENCE.toNanos();
        while (!attempt.call()) {
            if (System.nanoTime() > deadline) {
                throw new AssertionError(what + ": not within " + PATIENCE.toSeconds() + " s");
            }
            Thread.sleep(20);
        }
    }
}
