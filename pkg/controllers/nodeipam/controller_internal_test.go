package nodeipam

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestController_ReportsOnlyPodCIDRsThatTalosDoesNotExpect(t *testing.T) {
	t.Parallel()

	flannel := []string{"Flannel"}
	cloudAllocator := Options{Allocator: CloudAllocator, ClusterCIDRs: prefixes("10.1.0.0/16", "fd00:1::/48")}

	for name, test := range map[string]struct {
		nodename string
		bound    []string
		options  Options
		pools    []string
		want     string // source in the Event; empty: no Event
	}{
		"no pools":                     {nodename: "cp-1", bound: flannel},
		"pool inside":                  {nodename: "cp-1", bound: flannel, pools: []string{"10.1.128.0/17"}},
		"pool is podSubnet":            {nodename: "cp-1", bound: flannel, pools: []string{"10.1.0.0/16"}},
		"pool outside":                 {nodename: "cp-1", bound: flannel, pools: []string{"10.1.0.0/17", "10.2.0.0/16"}, want: "from 10.2.0.0/16 are"},
		"pool contains podSubnet":      {nodename: "cp-1", bound: flannel, pools: []string{"10.0.0.0/8"}, want: "from 10.0.0.0/8 are"},
		"flag outside":                 {nodename: "cp-1", bound: flannel, options: Options{ClusterCIDRs: prefixes("10.3.0.0/16")}, want: "from 10.3.0.0/16 are"},
		"own prefixes":                 {nodename: "cp-1", bound: flannel, options: cloudAllocator, want: "from IPv6 prefixes of machines are"},
		"own prefixes, IPv4 only":      {nodename: "cp-1", bound: flannel, options: Options{Allocator: CloudAllocator, ClusterCIDRs: prefixes("10.1.0.0/16")}},
		"neither Flannel nor its like": {nodename: "cp-1", pools: []string{"10.2.0.0/16"}},
		"no labeled Node":              {nodename: "this machine", bound: flannel, pools: []string{"10.2.0.0/16"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
			require.NoError(t, nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp-1"}}))

			recorder := record.NewFakeRecorder(10)
			c := &Controller{
				cfg: Config{
					ControlPlane: &controlplane.Value[*controlplane.Network]{}, Options: test.options,
					Pools: func() []Pool { return []Pool{{CIDRs: prefixes(test.pools...)}} },
				},
				lister: corelisters.NewNodeLister(nodes), reporter: events.New(recorder),
			}
			config := controlplane.KCMConfig{Nodename: test.nodename, KCMConfig: machine.KCMConfig{
				ClusterCIDRs: prefixes("10.1.0.0/16", "fd00:1::/48"), SubnetBound: test.bound,
			}}

			for range 2 {
				c.reportOutside(t.Context(), config, test.options)
			}

			if test.want == "" {
				assert.Empty(t, recorder.Events)

				return
			}

			require.Len(t, recorder.Events, 1)
			assert.Contains(t, <-recorder.Events, test.want)
		})
	}
}
