package alluvium.clients;

import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Callable;

/** A small test runner that reports in TAP (testanything.org). */
final class Tap {
    /** Limit after which a test fails instead of hanging. No test measures time. */
    static final Duration PATIENCE = Duration.ofSeconds(60);

    interface Test {
        void run() throws Exception;
    }

    private static final class Skipped extends RuntimeException {
        private static final long serialVersionUID = 1;

        Skipped(String reason) {
            super(reason);
        }
    }

    private final Map<String, Test> tests = new LinkedHashMap<>();

    void test(String name, Test test) {
        tests.put(name, test);
    }

    /** A test that is reported but does not run. */
    void skip(String name, String reason) {
        tests.put(name, () -> {
            throw new Skipped(reason);
        });
    }

    /** Runs all tests and returns how many failed. */
    int run() {
        System.out.println("1.." + tests.size());
        int number = 0;
        int failed = 0;
        for (Map.Entry<String, Test> each : tests.entrySet()) {
            number++;
            try {
                each.getValue().run();
                System.out.println("ok " + number + " - " + each.getKey());
            } catch (Skipped skipped) {
                System.out.println("ok " + number + " - " + each.getKey() + " # SKIP " + skipped.getMessage());
            } catch (Exception | AssertionError error) {
                failed++;
                StringWriter trace = new StringWriter();
                error.printStackTrace(new PrintWriter(trace));
                trace.toString().lines().forEach(line -> System.out.println("# " + line));
                String reason = String.valueOf(error.getMessage()).replace('\n', ' ');
                System.out.println("not ok " + number + " - " + each.getKey() + ": " + reason);
            }
        }
        return failed;
    }

    static void check(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    static void equal(Object got, Object wanted, String what) {
        check(Objects.equals(got, wanted), what + ": " + got + ", not " + wanted);
    }

    /** Asserts that the call fails with this error, or with one that has it as its cause. */
    static void fails(Class<? extends Exception> error, Test test) throws Exception {
        try {
            test.run();
        } catch (Exception thrown) {
            keep(thrown);
            for (Throwable cause = thrown; cause != null; cause = cause.getCause()) {
                if (error.isInstance(cause)) {
                    return;
                }
            }
            throw new AssertionError("it failed with " + thrown + ", not with " + error.getSimpleName(), thrown);
        }
        throw new AssertionError("it succeeded, but should fail with " + error.getSimpleName());
    }

    /** Stores an error, for suites that check what the server reveals to clients. */
    private static void keep(Exception thrown) throws IOException {
        String errors = System.getenv("ERRORS");
        if (errors == null) {
            return;
        }
        for (Throwable cause = thrown; cause != null; cause = cause.getCause()) {
            String line = "java: " + cause.toString().replace('\n', ' ') + "\n";
            Files.writeString(Path.of(errors), line, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
        }
    }

    /** Repeats the attempt until it returns true. */
    static void eventually(String what, Callable<Boolean> attempt) throws Exception {
        long deadline = System.nanoTime() + PATIENCE.toNanos();
        while (!attempt.call()) {
            check(System.nanoTime() < deadline, what + ": not within " + PATIENCE.toSeconds() + " s");
            Thread.sleep(20);
        }
    }

    private Tap() {
    }

    static Tap create() {
        return new Tap();
    }
}
