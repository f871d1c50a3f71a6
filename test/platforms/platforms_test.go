//go:build e2e

package platforms_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	values  = "values.md"
	timeout = time.Minute
)

// metadata is the handler for the metadata service of the machine that is running.
var metadata atomic.Pointer[http.HandlerFunc]

// serve sets the responses of the metadata service.
func (p platform) serve() {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, found := p.metadata[r.URL.Path]
		if !found {
			http.NotFound(w, r)

			return
		}

		w.Header().Set("Metadata-Flavor", "Google")
		w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "300")

		if strings.HasPrefix(body, "{") || strings.HasPrefix(body, "[") {
			w.Header().Set("Content-Type", "application/json")
		}

		fmt.Fprint(w, body)
	})
	metadata.Store(&handler)
}

func TestPlatforms(t *testing.T) {
	bed, err := talos.Clouds(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*metadata.Load())(w, r) }),
		talos.Options{LogDir: os.Getenv("TALOS_CCM_LOGS")})
	require.NoError(t, err)

	t.Cleanup(func() { assert.NoError(t, bed.Down()) })

	text, err := os.ReadFile(values)
	require.NoError(t, err)

	// The values are those of one release. On others, the machines must be identified.
	hasValues := bed.Release().Minor == "1.14"
	if hasValues {
		assert.Contains(t, string(text), "What Talos "+bed.Release().Talos)
	}

	for i, p := range platforms {
		if p.name == "alibabacloud" && !hasValues {
			continue // since Talos 1.14
		}

		t.Run(p.name, func(t *testing.T) {
			p.serve()

			m := boot(t, bed, i, p)
			defer m.PowerOff(context.WithoutCancel(t.Context())) //nolint:errcheck // Down repeats it

			var read view

			require.EventuallyWithT(t, func(t *assert.CollectT) {
				read = readMachine(t, m)
				assert.False(t, read.report.Pending, "%v", read.report.Problems)
			}, timeout, time.Second)

			assert.Empty(t, read.report.Problems)

			if hasValues {
				assert.Equal(t, strings.Join(read.rows(), "\n"), strings.Join(pageRows(string(text), p.name), "\n"))
			}
		})
	}

	t.Run("late and changed metadata", func(t *testing.T) {
		p := platforms[slices.IndexFunc(platforms, func(p platform) bool { return p.name == "hcloud" })]

		unavailable := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
		metadata.Store(&unavailable)

		m := boot(t, bed, len(platforms), p)
		defer m.PowerOff(context.WithoutCancel(t.Context())) //nolint:errcheck // Down repeats it

		// Nothing is written before the metadata service responds.
		require.EventuallyWithT(t, func(t *assert.CollectT) {
			read := readMachine(t, m)
			assert.True(t, read.report.Pending)
			assert.NotEmpty(t, read.machine.Nodename)
		}, timeout, time.Second)

		p.serve()
		awaitZone(t, m, "fsn1-dc14")

		// Talos reads metadata once in a boot.
		p.metadata = maps.Clone(p.metadata)
		p.metadata["/hetzner/v1/metadata/availability-zone"] = "nbg1-dc3"
		p.serve()
		require.NoError(t, m.PowerCycle(t.Context()))
		awaitZone(t, m, "nbg1-dc3")
	})
}

// boot boots the machine of a platform.
func boot(t *testing.T, bed *talos.Bed, n int, p platform) *talos.Machine {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()

	start := time.Now()

	m, err := bed.BootPlatform(ctx, n, p.name, seed)
	require.NoError(t, err)
	t.Logf("booted in %s", time.Since(start))

	return m
}

func awaitZone(t *testing.T, m *talos.Machine, zone string) {
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		read := readMachine(t, m)
		assert.False(t, read.report.Pending)
		assert.Equal(t, zone, read.label(corev1.LabelTopologyZone))
	}, timeout, time.Second)
}

// view is what Talos publishes of a machine, and what talos-ccm would write to a new Node of it.
type view struct {
	machine  machine.Machine
	external []string
	report   preview.Report
}

// readMachine reads a machine, as talos-ccm render --node does.
func readMachine(t require.TestingT, m *talos.Machine) view {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()

	c, err := m.TalosClient(ctx)
	require.NoError(t, err)

	defer c.Close() //nolint:errcheck // all calls have ended

	var resources machine.View

	for _, kind := range machine.BaseKinds().All() {
		list, err := c.COSI.List(ctx, kind)
		require.NoError(t, err)

		resources.ReplaceKind(kind, list.Items)
	}

	read := view{machine: resources.Machine(), external: externalIPs(ctx, t, c)}
	read.report = preview.Render(read.machine, preview.Kubelet{Architecture: "amd64"}, nodespec.Options{})

	return read
}

// externalIPs returns the addresses of Talos's pseudo link for addresses that no link of the machine has.
func externalIPs(ctx context.Context, t require.TestingT, c *client.Client) (list []string) {
	statuses, err := safe.StateListAll[*network.AddressStatus](ctx, c.COSI)
	require.NoError(t, err)

	for status := range statuses.All() {
		if spec := status.TypedSpec(); spec.LinkName == "external" {
			list = append(list, spec.Address.Addr().String())
		}
	}

	return list
}

// values returns the values of the Node for a field of the report and a key, which may be empty.
func (v view) values(field, key string) (list []string) {
	for _, change := range v.report.Changes {
		if change.Field == field && (key == "" || change.Key == key) {
			list = append(list, *change.After)
		}
	}

	return list
}

func (v view) label(key string) string { return strings.Join(v.values("label", key), "") }

// rows returns the rows of the platform's table in values.md without the column for the provider's CCM.
func (v view) rows() (rows []string) {
	meta := v.machine.Platform

	var tags []string
	for key, value := range meta.Tags {
		tags = append(tags, strings.TrimSuffix(key+"="+value, "="))
	}

	slices.Sort(tags)

	spot := ""
	if meta.Spot {
		spot = "true"
	}

	// Fields that every CCM sets have a row even if they are empty.
	const always = 6

	for i, row := range [][]string{
		{"name", meta.Hostname, v.report.Name},
		{"providerID", meta.ProviderID, strings.Join(v.values("providerID", ""), "")},
		{"instance ID", meta.InstanceID, ""},
		{"instance type", meta.InstanceType, v.label(corev1.LabelInstanceTypeStable)},
		{"region", meta.Region, v.label(corev1.LabelTopologyRegion)},
		{"zone", meta.Zone, v.label(corev1.LabelTopologyZone)},
		{"spot", spot, v.label(nodespec.LabelLifecycle)},
		{"tags", strings.Join(tags, ", "), ""},
		{"InternalIP", "", strings.Join(v.values("address", string(corev1.NodeInternalIP)), ", ")},
		{"ExternalIP", strings.Join(v.external, ", "), strings.Join(v.values("address", string(corev1.NodeExternalIP)), ", ")},
		{"Hostname", "", strings.Join(v.values("address", string(corev1.NodeHostName)), ", ")},
		{"InternalDNS", meta.InternalDNS, strings.Join(v.values("address", string(corev1.NodeInternalDNS)), ", ")},
		{"ExternalDNS", meta.ExternalDNS, strings.Join(v.values("address", string(corev1.NodeExternalDNS)), ", ")},
	} {
		if i < always || row[1]+row[2] != "" {
			rows = append(rows, row[0]+" | "+cmp.Or(row[1], "-")+" | "+cmp.Or(row[2], "-"))
		}
	}

	return rows
}

// pageRows returns the rows of a platform's table in values.md in the format of rows.
func pageRows(text, platform string) (rows []string) {
	_, section, _ := strings.Cut(text, "\n## "+platform+"\n")
	section, _, _ = strings.Cut(section, "\n## ")

	for line := range strings.Lines(section) {
		cells := strings.Split(strings.TrimSpace(strings.ReplaceAll(line, "`", "")), " | ")
		if !strings.HasPrefix(line, "| ") || len(cells) != 4 || cells[1] == "Talos" {
			continue
		}

		for i := range cells {
			cells[i] = strings.TrimSpace(strings.Trim(cells[i], "|"))
		}

		rows = append(rows, strings.Join(cells[:3], " | "))
	}

	return rows
}
