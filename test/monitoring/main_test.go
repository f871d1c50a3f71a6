// Package monitoring_test compares metrics.txt, the list of exported metrics, with scrapes of a running talos-ccm after
// everything that an alert reports has happened.
//
// The nested module prometheus tests the dashboard and the alerts themselves. It reads metrics.txt and starts no processes.
package monitoring_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// bed is a Kubernetes control plane, without Nodes, and Talos machines.
type bed struct {
	ctest.Suite

	// url is the URL of the metrics of talos-ccm, and seen has all that scrapes have returned.
	url  string
	seen families
}

func newBed(t *testing.T) *bed {
	t.Helper()

	return &bed{Suite: ctest.Start(t, kube.Options{}), seen: families{sets.New[string]()}}
}

// start runs talos-ccm as the extension of the machine, until the test ends.
func (b *bed) start(on *talostest.Machine, flags ...string) {
	b.Helper()

	dir := b.TempDir()
	executable := filepath.Join(dir, "talos-ccm")
	require.NoError(b, builder.Executable("../../cmd/talos-ccm", executable))

	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(b, err)
	b.Cleanup(func() { log.Close() })

	port, err := kube.ReservePort()
	require.NoError(b, err)
	b.Cleanup(port.Release)

	cmd := exec.Command(executable, append([]string{
		"--machine-socket=" + on.Socket(), "--run-dir=" + dir, "--cert-dir=" + dir, "--authorization-always-allow-paths=/metrics",
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port.Number()), "--permit-port-sharing",
		// The process exits when it loses its lease. A machine under load must not cause that.
		"--leader-elect-lease-duration=600s", "--leader-elect-renew-deadline=500s",
	}, flags...)...)
	// As on Talos, only the variable of the extension's service.
	cmd.Env = []string{"GOMEMLIMIT=512MiB"}
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(b, cmd.Start())

	b.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)

		assert.NoError(b, cmd.Wait())

		if text, err := os.ReadFile(log.Name()); b.Failed() && err == nil {
			b.Logf("the log of talos-ccm:\n%s", text)
		}
	})

	b.url = "https://" + port.Address() + "/metrics"
}

// scrape reads all metrics, as Prometheus does.
func scrape(ctx context.Context, url string) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()

	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("scrape %s: %w", url, err)
	}

	client := http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // self-signed, on loopback
		DisableKeepAlives: true,
	}}

	response, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("scrape %s: %w", url, err)
	}
	defer response.Body.Close()

	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scrape %s: %w", url, errors.New(response.Status))
	}

	parser := expfmt.NewTextParser(model.LegacyValidation)

	return parser.TextToMetricFamilies(response.Body)
}
