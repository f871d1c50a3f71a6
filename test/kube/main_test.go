package kube_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

// victimEnv makes the test binary a process that starts a cluster with a kubelet, prints their process ids, and waits to be killed.
const victimEnv = "TALOS_CCM_KUBE_TEST_VICTIM"

func TestMain(m *testing.M) {
	if os.Getenv(victimEnv) == "" {
		os.Exit(m.Run())
	}

	if err := beVictim(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func beVictim(ctx context.Context) error {
	cluster, err := kube.Start(ctx, kube.Options{Progress: os.Stderr})
	if err != nil {
		return err
	}

	if _, err := cluster.StartKubelet(ctx, kube.KubeletSpec{NodeName: "victim"}); err != nil {
		return err
	}

	if err := json.NewEncoder(os.Stdout).Encode(cluster.PIDs()); err != nil {
		return err
	}

	select {}
}
