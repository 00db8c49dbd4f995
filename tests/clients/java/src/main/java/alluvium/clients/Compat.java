package alluvium.clients;

import java.time.Duration;

/** The calls of kafka-clients for Apache Kafka 4: {@code BOOTSTRAP=127.0.0.1:9092 java -cp ... alluvium.clients.Compat}. */
public final class Compat {
    /** Exits with 1 if a test failed. */
    public static void main(String[] args) {
        Tap tap = Tap.create();
        Admins.register(tap);
        Transactions.register(tap);
        NewGroups.register(tap);
        ShareGroups.register(tap);
        int failed = tap.run();
        Suite.ADMIN.close(Duration.ofSeconds(5));
        System.exit(failed == 0 ? 0 : 1);
    }

    private Compat() {
    }
}
