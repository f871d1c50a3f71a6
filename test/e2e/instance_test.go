//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// instance is a talos-ccm that is no extension. It is where other machines would be, and waits for the lease.
type instance struct {
	dir   string
	ended chan struct{}
	// err is how it ended; valid once ended is closed.
	err error
}

// startInstance starts one, of the version that the machines booted with, with the configuration of the test.
func startInstance(t *testing.T) *instance {
	t.Helper()

	i := &instance{dir: t.TempDir(), ended: make(chan struct{})}

	for name, content := range map[string][]byte{"kubeconfig": bed.Kubeconfig(), "config.yaml": []byte(keptRules)} {
		require.NoError(t, os.WriteFile(filepath.Join(i.dir, name), content, 0o600))
	}

	// It outlives the time without an API server, as an instance on another machine would, and asks for the lease more often than the extension, which
	// starts at the same time as the API server. The environment is for flags.
	script := fmt.Sprintf(`cd %s && echo $$ > pid && exec env -i %s --talosconfig=$TALOSCONFIG --kubeconfig=kubeconfig --cloud-config=config.yaml \
		--leader-elect-lease-duration=5m --leader-elect-renew-deadline=4m --leader-elect-retry-period=500ms 2> log`, i.dir, binary())

	ctx, kill := context.WithCancel(context.WithoutCancel(t.Context()))

	go func() {
		defer close(i.ended)

		_, i.err = bed.Shell(ctx, script)
	}()

	t.Cleanup(func() {
		kill()
		<-i.ended
	})

	eventually(t, func(context.Context) error {
		if log := i.log(); !strings.Contains(log, "leader lease") {
			return fmt.Errorf("the other instance does not wait for the lease:\n%s", log)
		}

		return nil
	})

	return i
}

// log is what the instance has logged, or why that cannot be read.
func (i *instance) log() string {
	log, err := os.ReadFile(filepath.Join(i.dir, "log"))
	if err != nil {
		return err.Error()
	}

	return string(log)
}

// stop tells the instance to end, and waits until it has.
func (i *instance) stop(t *testing.T) {
	t.Helper()

	text, err := os.ReadFile(filepath.Join(i.dir, "pid"))
	require.NoError(t, err)

	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)

	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))

	<-i.ended
	assert.NoError(t, i.err, i.log())
}
